"""`towerctl bench longchat`: what a bounded live cache costs, per policy, on the torch reference."""

from __future__ import annotations

import bisect
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from towerd.cli.bench.longchat_recall import index_overhead, recalls
from towerd.cli.bench.longchat_texts import Ids, Speaker, read_meetings, read_pairs, read_text
from towerd.cli.bench.models import bench_model
from towerd.cli.bench.report import Report
from towerd.cli.output import progress_bar, show_table
from towerd.codec import sample
from towerd.codec.train.tasks import Fact, passkey
from towerd.errors import TowerdError
from towerd.models.bundled import bundled_model, retrieval_model
from towerd.models.random_gguf import PRESETS
from towerd.retention import NAMES, retention_config
from towerd.retention.base import RetentionConfig, View
from towerd.retention.buzz import BuzzConfig, threshold_per_window
from towerd.retention.choice import SINK_DEFAULT
from towerd.retention.factory import open_retention

if TYPE_CHECKING:
    from towerd.retention.reference.llama import Llama

SAMPLE = "sample.txt"
"""The text of the package."""
POLICIES = tuple(name for name in NAMES if name != "none")
BUDGETS = (50, 100, 200, 400)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
RETRIEVAL_BUDGETS = (64, 128, 256)
RETRIEVAL_TOKENS = (1024, 2048)
WAYS = ("buzz", "buzz_mean", "buzz_after")
"""What BUZZ's live tokens are counted by: the most, their mean, those left after an eviction."""
TEXT_TOKENS_MAX = 2048
STEPS_PER_BUDGET = 8
"""Room is made for an eighth of the budget at a time, so that a policy is asked that rarely."""
STEP_TOKENS_MAX = 32
RECALL_BUDGET = 64
N_QUERIES = 8


@dataclass(slots=True)
class LongchatReport(Report):
    """`perplexity`, `by_head`, `retrieval`: a line each; the first keys of each are its place."""

    perplexity: list[dict[str, Any]] = field(default_factory=list)
    by_head: list[dict[str, Any]] = field(default_factory=list)
    retrieval: list[dict[str, Any]] = field(default_factory=list)

    def show(self) -> None:
        for title, rows in (
            ("perplexity / full", self.perplexity),
            ("one policy for each head", self.by_head),
            ("answers found", self.retrieval),
        ):
            if rows:
                columns = [key for key in rows[0] if key != "depths"]
                show_table(
                    (title, *(f">{name}" for name in columns[1:])),
                    [tuple(_cell(row[name]) for name in columns) for row in rows],
                )
        Report.show(self)

    def as_json(self) -> Mapping[str, Any]:
        more = {"perplexity": self.perplexity, "by_head": self.by_head}
        return {**Report.as_json(self), **more, "retrieval": self.retrieval}


async def run(
    model: Path | None,
    quick: bool,
    *,
    text: Path | None,
    meetings: Path | None,
    pairs: Path | None,
    retrieval: Path | None,
) -> Report:
    """Perplexity, retrieval, recall and the cost of the index. Raises TowerdError."""
    if importlib.util.find_spec("torch") is None:
        raise TowerdError(
            "bench longchat needs torch: install towerd with its extra, pip install 'towerd[train]'."
        )
    from towerd.retention.reference.llama import Llama

    path = bundled_model() if model is None else model
    report = LongchatReport("longchat", path.name)
    llama = Llama.load(path)
    with Speaker(path) as speaker:
        name = SAMPLE if text is None else text.name
        texts = {name: sample.load().decode() if text is None else read_text(text)}
        if meetings is None:
            report.details["meetings"] = "not measured: name QMSum's file with --meetings"
        else:
            texts[meetings.name] = read_meetings(meetings)
        n = min(llama.shape.n_ctx, TEXT_TOKENS_MAX)
        n_windows = 2 if quick else 8
        windows = {key: speaker.windows(read, n_windows, n) for key, read in texts.items()}
    _perplexity(report, llama, windows, quick)
    _recall(report, path.name, llama, windows[name])
    _retrieval(report, retrieval or retrieval_model(), texts[name], pairs, quick)
    _overhead(report, quick)
    return report


def step_of(budget: int) -> int:
    """Tokens that are read at once under a budget."""
    return max(1, min(STEP_TOKENS_MAX, budget // STEPS_PER_BUDGET))


def config_for(name: str, budget: int) -> RetentionConfig:
    """What a policy may keep when room is made under a budget."""
    return retention_config(name, budget - step_of(budget))


def mean_live(name: str, budget: int, n: int) -> float:
    """Tokens that each of n sees, on the mean, where attention does not matter for how many."""
    policy, step = open_retention(config_for(name, budget)), step_of(budget)
    live = np.empty(0, np.int64)
    seen: list[int] = []
    for first in range(0, n, step):
        n_new = min(step, n - first)
        if len(live) + n_new > budget:
            view = View(live, first, mass=np.zeros(len(live), np.float32))
            live = policy.keep(view, budget - n_new)
        seen += range(len(live) + 1, len(live) + n_new + 1)
        live = np.concatenate([live, np.arange(first, first + n_new)])
    return float(np.mean(seen))


def budget_of_same_mean(budget: int, n: int) -> int:
    """The budget, at most n, under which BUZZ has as many tokens live on the mean as the policies
    that fill `budget` at all times. The paper's cache sizes are means (section 4.2.1)."""
    wanted = mean_live("streaming", budget, n)
    larger = range(budget, n)
    return budget + bisect.bisect_left(larger, wanted, key=lambda b: mean_live("buzz", b, n))


def buzz_after(live: int) -> tuple[BuzzConfig, int]:
    """BUZZ that has about `live` tokens left after an eviction, which is its sink and twice its
    window ("post-eviction cache size" in section 4.1), and the most that are ever live then."""
    window = max(1, (live - SINK_DEFAULT) // 2)
    stride = BuzzConfig().stride
    config = BuzzConfig(window=window, threshold=round(threshold_per_window(stride) * window))
    return config, config.budget + step_of(config.budget + step_of(config.budget))


def _perplexity(
    report: LongchatReport, llama: Llama, windows: Mapping[str, Ids], quick: bool
) -> None:
    worst = {(way, rival): 0.0 for way in WAYS for rival in ("h2o", "streaming")}
    jobs = list(_budgets(windows, quick))
    by_head_at = 100
    n_runs = len(jobs) * len(POLICIES) + len(windows) * len(POLICIES)
    with progress_bar((), quiet=False) as bar:
        task = bar.add_task("perplexity", total=n_runs)
        full: dict[str, float] = {}
        for name, ids in windows.items():
            full[name] = _perplexity_of(llama, ids, None, ids.shape[1])
            report.figures[f"ppl_full {name}"] = full[name]
        for name, budget, ids in jobs:
            row: dict[str, Any] = {"text": name, "live": budget}
            for policy in POLICIES:
                found = _perplexity_of(llama, ids, config_for(policy, budget), budget)
                row[policy] = found / full[name]
                bar.advance(task)
            wide = budget_of_same_mean(budget, ids.shape[1])
            after, most = buzz_after(budget)
            for way, config, n_max in (
                ("buzz_mean", config_for("buzz", wide), wide), ("buzz_after", after, most)
            ):  # fmt: skip
                row[way] = None
                if n_max < ids.shape[1]:
                    row[way] = _perplexity_of(llama, ids, config, n_max) / full[name]
            report.perplexity.append(row)
            for way, rival in worst:
                if row[way] is not None:
                    worst[way, rival] = max(worst[way, rival], row[way] / row[rival])
        for name, ids in windows.items():
            row = {"text": name, "live": by_head_at}
            for policy in POLICIES:
                config = config_for(policy, by_head_at)
                found = _perplexity_of(llama, ids, config, by_head_at, by_head=True)
                row[policy] = found / full[name]
                bar.advance(task)
            report.by_head.append(row)
    for (way, rival), ratio in worst.items():
        if not ratio:
            continue  # nothing was ever evicted
        report.figures[f"{way}_vs_{rival}_ppl"] = ratio
    for rival in ("h2o", "streaming"):
        report.target(f"buzz_vs_{rival}_ppl", most=1.0)


def _budgets(windows: Mapping[str, Ids], quick: bool) -> Iterator[tuple[str, int, Ids]]:
    for name, ids in windows.items():
        n = ids.shape[1]
        shares = () if quick else tuple(round(share * n) for share in SHARES)
        for budget in sorted({*BUDGETS, *shares}):
            if budget < n:
                yield name, budget, ids


def _perplexity_of(
    llama: Llama,
    ids: Ids,
    config: RetentionConfig | None,
    budget: int,
    *,
    by_head: bool = False,
) -> float:
    import torch

    from towerd.retention.reference.chat import Chats, surprises

    chats = Chats(llama, len(ids), ids.shape[1], config, budget, by_head=by_head)
    step = STEP_TOKENS_MAX if config is None else step_of(budget)
    return float(surprises(chats, torch.from_numpy(ids), step).mean().exp())


def _recall(report: LongchatReport, name: str, llama: Llama, windows: Ids) -> None:
    """On keys and queries of the text: every layer, the last queries, all keys before them."""
    import torch

    each: dict[str, list[float]] = {}
    for ids in windows[:4]:
        n = len(ids)
        cache = llama.cache(1, n)
        llama.evaluate(torch.from_numpy(ids[None, : n - N_QUERIES]), cache)
        llama.evaluate(torch.from_numpy(ids[None, n - N_QUERIES :]), cache)
        keys = cache.keys[:, 0, :, : n - N_QUERIES].numpy()
        for way, share in recalls(keys, cache.queries[:, 0].numpy(), RECALL_BUDGET).items():
            each.setdefault(way, []).append(share)
    found = {way: float(np.mean(shares)) for way, shares in each.items()}
    for way, share in found.items():
        report.figures[f"recall_{way} {name}"] = share
    for key, rival in (("sequential", "quest"), ("ranked", "ranked")):
        ratio, so_far = f"icecache_recall_vs_{key}", report.figures
        so_far[ratio] = min(so_far.get(ratio, np.inf), found["icecache"] / found[rival])
    report.target("icecache_recall_vs_sequential", least=1.3)


def _retrieval(
    report: LongchatReport, path: Path, text: str, pairs: Path | None, quick: bool
) -> None:
    from towerd.retention.reference.llama import Llama

    llama = Llama.load(path)
    with Speaker(path) as speaker:
        n_depths = 5 if quick else 20
        lengths = [n for n in RETRIEVAL_TOKENS if n <= llama.shape.n_ctx] or [llama.shape.n_ctx]
        for n in lengths[:1] if quick else lengths:
            context, question, answer = _passkeys(speaker, text, n, n_depths)
            _retrieve(report, llama, f"pass key in {n}", context, question, answer)
        own = speaker.windows(text, 2 if quick else 4, lengths[-1])
        _recall(report, path.name, llama, own)
        if pairs is None:
            report.details["pairs"] = "not measured: name the key-value examples with --pairs"
        else:
            for i, (facts, asked) in enumerate(read_pairs(pairs, 5 if quick else 20)):
                row = [speaker.ids(fact.text) for fact in facts]
                told = np.concatenate([speaker.bos, *row])[None]
                parts = (speaker.ids(facts[asked].question), speaker.ids(facts[asked].answer))
                _retrieve(report, llama, "75 pairs", told, *(part[None] for part in parts), first=i)
    _sum_up(report, lengths[0])


def _passkeys(speaker: Speaker, text: str, n: int, n_depths: int) -> tuple[Ids, Ids, Ids]:
    """[n_depths, ...]: contexts of n tokens with a key at depths 0 to 1, questions, answers."""
    chance = np.random.default_rng(1)
    filler = speaker.windows(text, n_depths, n)
    rows, questions, keys = [], [], []
    for i, ids in enumerate(filler):
        fact: Fact = passkey(chance)
        told = speaker.ids(fact.text)
        at = len(speaker.bos) + int(i / max(1, n_depths - 1) * (n - len(told) - 1))
        rows.append(np.concatenate([ids[:at], told, ids[at:]])[:n])
        questions.append(speaker.ids(fact.question))
        keys.append(speaker.ids(fact.answer))
    width = min(map(len, rows))
    return np.stack([row[:width] for row in rows]), np.stack(questions), np.stack(keys)


def _retrieve(
    report: LongchatReport,
    llama: Llama,
    task: str,
    context: Ids,
    question: Ids,
    answer: Ids,
    *,
    first: int = 0,
) -> None:
    """Accuracy of every policy at every budget; a task that comes again adds to its rows."""
    import torch

    from towerd.retention.reference.chat import Chats, answers

    n = context.shape[1] + question.shape[1] + answer.shape[1]
    told, asked, wanted = (torch.from_numpy(part) for part in (context, question, answer))
    for live in (n, *RETRIEVAL_BUDGETS):
        row: dict[str, Any] = {
            "task": task,
            "live": "full" if live == n else str(live),
            "depths": {},
        }
        names = ("full",) if live == n else POLICIES
        for name in names:
            step = STEP_TOKENS_MAX if live == n else step_of(live)
            room = live - max(step, question.shape[1])
            config = None if live == n else retention_config(name, room)
            chats = Chats(llama, len(context), n, config, live)
            row["depths"][name] = answers(chats, told, asked, wanted, step).tolist()
        if first == 0:
            report.retrieval.append(row)
            continue
        same = [r for r in report.retrieval if (r["task"], r["live"]) == (task, row["live"])]
        for name, right in row["depths"].items():
            same[0]["depths"][name] += right


def _sum_up(report: LongchatReport, length: int) -> None:
    """Shares from single answers; IceCache at 256 against the full cache."""
    full: dict[str, float] = {}
    for row in report.retrieval:
        shares = {name: float(np.mean(right)) for name, right in row["depths"].items()}
        if row["live"] == "full":
            full[row["task"]] = shares["full"]
        for name in POLICIES:
            row[name] = shares.get(name, shares.get("full", 0.0))
    report.figures["retrieval_full"] = full[f"pass key in {length}"]
    ratios = [row["icecache"] / full[row["task"]] for row in report.retrieval
              if row["live"] == "256" and full[row["task"]] > 0]  # fmt: skip
    if ratios:
        report.figures["icecache_retrieval_256"] = min(ratios)
        report.target("icecache_retrieval_256", least=0.99)


def _overhead(report: LongchatReport, quick: bool) -> None:
    preset = "small" if quick else "1b"
    shape, n = PRESETS[preset], 512 if quick else 2048
    head_size = shape.head_dim or shape.n_embd // shape.n_head
    found = index_overhead(bench_model(None, preset), n, head_size, n_threads=2)
    report.figures["index_tokens"] = n
    report.figures |= found
    report.figures["index_overhead"] = found["index_s"] / found["prefill_s"]
    report.target("index_overhead", most=0.1)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
