"""`towerctl precache`: evaluate, store and pin a tree of base prompts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towerd.cli.client.target import Target, daemon_for, json_option, setting_option, target_options
from towerd.cli.client.transport import Json
from towerd.errors import TowerdError

if TYPE_CHECKING:
    from rich.progress import Progress

    from towerd.cli.client.api_client import ApiClient
    from towerd.cli.precache.spec import Prompt
    from towerd.cli.progress import Lines


@dataclass(frozen=True, slots=True)
class Planned:
    """A base of the file, tokenized, and its state in the store."""

    prompt: Prompt
    ids: list[int]
    status: str
    """new, changed or unchanged."""
    segment: int | None

    @property
    def digest(self) -> str:
        return digest_of(self.ids)


@click.command()
@click.argument("spec", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Only show what would be evaluated.")
@setting_option("model")
@setting_option("ctx_size")
@setting_option("cache_type_k")
@setting_option("cache_type_v")
@json_option
@target_options
def precache(
    spec: Path,
    dry_run: bool,
    as_json: bool,
    target: Target,
    **model: Any,
) -> None:
    """Evaluate the prompts of the YAML file SPEC, store them and pin them.

    Prompts that have not changed since the last time are skipped. Without a running daemon the
    model is loaded for this command, with the settings of towerd.toml and the options here.
    """
    from towerd.cli.output import echo_json
    from towerd.cli.precache.spec import load_spec

    root = load_spec(spec)
    with daemon_for(target, model, quiet=as_json) as daemon:
        plan = make_plan(daemon, root, spec)
        reports = [_report(base) for base in plan]
        if not dry_run:
            _evaluate(daemon, plan, reports, quiet=as_json)
    if as_json:
        echo_json({"spec": str(spec), "dry_run": dry_run, "bases": reports})
    else:
        _print(reports, dry_run)


def make_plan(daemon: ApiClient, root: Prompt, spec: Path) -> list[Planned]:
    """Every base with its ids, parents first. Raises SpecError."""
    ids = _tokenize(daemon, root, spec)
    known = {(base["name"], base["public"]): base for base in daemon.bases()}
    n_ctx = daemon.stats()["n_ctx"]
    plan = []
    for prompt in root.walk():
        n = len(ids[prompt.name])
        if n >= n_ctx:
            raise _problem(spec, prompt, f"{n:,} tokens do not fit the context of {n_ctx:,}")
        old = known.get((prompt.name, prompt.public))
        status = "new"
        if old is not None:
            is_same = _is_same(old, prompt, digest_of(ids[prompt.name]))
            status = "unchanged" if is_same else "changed"
        same = old if old is not None and status == "unchanged" else {}
        plan.append(Planned(prompt, ids[prompt.name], status, same.get("segment")))
    return plan


def _is_same(old: Json, prompt: Prompt, digest: str) -> bool:
    """Whether the stored base `old` matches the file."""
    is_anywhere = old["reuse"] == "anywhere"
    known = old["digest"], old["level"], old["format"], is_anywhere
    return bool(known == (digest, prompt.level, prompt.format, prompt.anywhere))


def digest_of(ids: Sequence[int]) -> str:
    """The digest of a base's ids, as in the store."""
    import numpy as np

    return hashlib.blake2b(np.asarray(ids, "<i4").tobytes(), digest_size=32).hexdigest()


def _tokenize(daemon: ApiClient, root: Prompt, spec: Path) -> dict[str, list[int]]:
    """Name -> ids. Each prompt is tokenized as a whole, as a request's will be; then the end that
    it does not share with its children is cut off, so that every child's ids begin with its ids."""
    texts: dict[str, str] = {}
    ids: dict[str, list[int]] = {}

    def read(prompt: Prompt, above: str, said: list[dict[str, str]]) -> None:
        if prompt.anywhere:
            ids[prompt.name] = daemon.tokenize(prompt.text)
            return
        said = [*said, *prompt.messages]
        texts[prompt.name] = _text(daemon, prompt, above, said, spec)
        ids[prompt.name] = daemon.tokenize(texts[prompt.name])
        for child in prompt.children:
            read(child, texts[prompt.name], said)
            if child.anywhere:
                continue
            n = len(os.path.commonprefix([ids[prompt.name], ids[child.name]]))
            ids[prompt.name] = ids[prompt.name][:n]
        if not ids[prompt.name]:
            raise _problem(spec, prompt, "makes no tokens of its own")

    read(root, "", [])
    return ids


def _text(
    daemon: ApiClient, prompt: Prompt, above: str, said: list[dict[str, str]], spec: Path
) -> str:
    if not prompt.messages:
        return above + prompt.text
    try:
        text = daemon.apply_template(said)
    except TowerdError as error:
        raise _problem(spec, prompt, f"the chat template refused: {error.message}") from error
    if not text.startswith(above):
        raise _problem(
            spec,
            prompt,
            "the chat template does not continue the parent's text with these messages; "
            "use 'text' with the template's marks written out",
        )
    return text


def _problem(spec: Path, prompt: Prompt, text: str) -> TowerdError:
    from towerd.cli.precache.spec import SpecError

    return SpecError(f"{spec}:{prompt.line}: '{prompt.name}': {text}")


def _report(base: Planned) -> Json:
    """The JSON report of one base."""
    prompt = base.prompt
    return {
        "name": prompt.name,
        "level": prompt.level,
        "public": prompt.public,
        "format": prompt.format,
        "tokens": len(base.ids),
        "digest": base.digest,
        "status": base.status,
        "segment": base.segment,
        "anywhere": prompt.anywhere,
        "reuse": None,
    }


def _evaluate(daemon: ApiClient, plan: list[Planned], reports: list[Json], *, quiet: bool) -> None:
    from rich.progress import MofNCompleteColumn

    from towerd.cli.output import progress_bar

    total = sum(len(base.ids) for base in plan)
    with progress_bar((MofNCompleteColumn(),), quiet=quiet) as bar:
        overall = bar.add_task("all, tokens", total=total)
        for base, report in zip(plan, reports, strict=True):
            if base.status != "unchanged":
                done = _evaluate_one(daemon, base, bar)
                report |= {"segment": done["base"]["segment"], "reuse": done["reuse"]}
            bar.advance(overall, len(base.ids))


def _evaluate_one(daemon: ApiClient, base: Planned, bar: Lines | Progress) -> Json:
    prompt = base.prompt
    task = bar.add_task(prompt.name, total=len(base.ids))
    try:
        return daemon.precache(
            prompt.name,
            base.ids,
            level=prompt.level,
            public=prompt.public,
            format=prompt.format,
            anywhere=prompt.anywhere,
            progress=lambda done, _: bar.update(task, completed=done),
        )
    finally:
        bar.remove_task(task)


def _print(reports: list[Json], dry_run: bool) -> None:
    from towerd.cli.output import show_table

    columns: tuple[str, ...] = ("BASE", ">TOKENS", ">REUSED", "STATUS", ">SEGMENT")
    rows: list[tuple[str, ...]] = [
        (
            "  " * report["level"] + report["name"],
            f"{report['tokens']:,}",
            f"{_reused(report):,}" if report["reuse"] else "-",
            report["status"],
            str(report["segment"] or "-"),
        )
        for report in reports
    ]
    show_table(columns, rows, wraps=True)
    todo = [report for report in reports if report["status"] != "unchanged"]
    if dry_run:
        click.echo(f"{len(todo)} of {len(reports)} bases would be evaluated; nothing was changed.")
    else:
        click.echo(
            f"{len(todo)} of {len(reports)} bases were evaluated; the others were there already."
        )


def _reused(report: Json) -> int:
    reuse = report["reuse"]
    return int(reuse["live"] + reuse["hot"] + reuse["warm"])
