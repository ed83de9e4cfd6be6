"""The torch reference against llama.cpp, with and without holes, and chats under a budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from towerd.config import Config
from towerd.engine.embedded.context import LlamaContext
from towerd.engine.embedded.model import LlamaModel
from towerd.errors import ModelError
from towerd.models.bundled import bundled_model
from towerd.models.random_gguf import Shape, make_random_gguf
from towerd.retention import NAMES, retention_config

torch = pytest.importorskip("torch")

from towerd.retention.reference.chat import Chats, answers, surprises  # noqa: E402
from towerd.retention.reference.llama import Llama  # noqa: E402
from towerd.retention.reference.weights import read_llama  # noqa: E402

Logits = npt.NDArray[np.float64]
TOLERANCE = 2e-4
"""Of logits, relative to their spread: both add up 32-bit floats, in other orders."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, three query heads for each KV head, a RoPE base of its own."""
    path = tmp_path_factory.mktemp("model") / "grouped.gguf"
    shape = Shape(n_layer=3, n_embd=96, n_head=6, n_head_kv=2, n_ff=64, n_vocab=448,
                  n_ctx_train=512, rope_freq_base=5000.0, ftype="F32")  # fmt: skip
    make_random_gguf(path, shape)
    return path


@pytest.fixture(scope="module", params=["bundled", "grouped"])
def path(request: pytest.FixtureRequest, grouped: Path) -> Path:
    return bundled_model() if request.param == "bundled" else grouped


@pytest.fixture
def context(path: Path) -> Iterator[LlamaContext]:
    config = Config(model=path, cache_type_k="f32", cache_type_v="f32", flash_attn="off", threads=1)
    model = LlamaModel(path, config)
    found = LlamaContext(model, config, n_cells=512, n_seqs=1)
    yield found
    found.close()
    model.close()


def llama_logits(context: LlamaContext, ids: list[int], first: int) -> Logits:
    context.batch.add(np.array(ids, np.int32), first, 0, logits_last=True)
    context.batch.logits[: len(ids)] = 1
    context.decode()
    return np.array([context.logits(i).astype(np.float64) for i in range(len(ids))])


def check_same(ours: object, theirs: Logits) -> None:
    wide = np.asarray(ours, np.float64)
    assert np.abs(wide - theirs).max() <= TOLERANCE * theirs.std()


def some_ids(n: int, seed: int = 1) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(260, 440, n - 1).tolist()]


def test_logits_are_llama_cpps(path: Path, context: LlamaContext) -> None:
    """A text in three parts; nothing is dropped."""
    model, ids = Llama.load(path), some_ids(150)
    cache = model.cache(1, 200)
    for first, last in ((0, 60), (60, 61), (61, 150)):
        ours = model.evaluate(torch.tensor([ids[first:last]]), cache)[0]
        check_same(ours, llama_logits(context, ids[first:last], first))


def test_holes_are_what_dropping_positions_is(path: Path, context: LlamaContext) -> None:
    """Positions dropped from llama.cpp's cache, and the same ones hidden here."""
    model, ids = Llama.load(path), some_ids(120, 2)
    cache = model.cache(1, 120)
    model.evaluate(torch.tensor([ids[:80]]), cache)
    llama_logits(context, ids[:80], 0)
    for first, last in ((4, 9), (20, 61)):
        context.seq_rm(0, first, last)
        cache.live[..., first:last] = False
    ours = model.evaluate(torch.tensor([ids[80:]]), cache)[0]
    check_same(ours, llama_logits(context, ids[80:], 80))


def test_every_query_spreads_a_mass_of_one(grouped: Path) -> None:
    model = Llama.load(grouped)
    cache = model.cache(2, 40)
    ids = torch.tensor([some_ids(40), some_ids(40, 3)])
    model.evaluate(ids[:, :30], cache)
    model.evaluate(ids[:, 30:], cache)
    torch.testing.assert_close(cache.mass.sum(-1), torch.full((3, 2, 6), 40.0))
    torch.testing.assert_close(cache.recent.sum(-1), torch.full((3, 2, 6), 10.0))


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_budget_as_long_as_the_text_changes_nothing(name: str, by_head: bool) -> None:
    model = Llama.load(bundled_model())
    ids = torch.tensor([some_ids(90), some_ids(90, 4)])
    whole = surprises(Chats(model, 2, 90, None, 90), ids, 10)
    config = retention_config(name, 90)
    chats = Chats(model, 2, 90, config, 100, by_head=by_head)
    assert torch.equal(surprises(chats, ids, 10), whole)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_budgets_hold_and_cost_something(name: str, by_head: bool) -> None:
    """No head ever sees more than the budget, and the two texts do not disturb each other."""
    model, budget, step = Llama.load(bundled_model()), 40, 8
    ids = torch.tensor([some_ids(72), some_ids(72, 4)])
    config = retention_config(name, budget - step)
    chats = Chats(model, 2, 72, config, budget, by_head=by_head)
    for first in range(0, 72, step):
        chats.read(ids[:, first : first + step])
        assert chats.n_live_max <= budget
    alone = surprises(Chats(model, 1, 72, config, budget, by_head=by_head), ids[1:], step)
    both = surprises(Chats(model, 2, 72, config, budget, by_head=by_head), ids, step)
    torch.testing.assert_close(both[1:], alone, rtol=1e-3, atol=1e-3)
    whole = surprises(Chats(model, 2, 72, None, 72), ids, step)
    assert not torch.allclose(both, whole, atol=1e-2)


def test_surprises_are_the_cross_entropy(grouped: Path) -> None:
    model, ids = Llama.load(grouped), torch.tensor([some_ids(50)])
    logits = model.evaluate(ids, model.cache(1, 50))[0, :-1].double()
    expected = -logits.log_softmax(-1)[torch.arange(49), ids[0, 1:]]
    found = surprises(Chats(model, 1, 50, None, 50), ids, 7)[0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_answers_are_those_of_the_model(grouped: Path) -> None:
    """The greedy continuation is right, anything else is not; a recall of everything is the same
    as having dropped nothing."""
    model, ids = Llama.load(grouped), some_ids(60)
    cache = model.cache(1, 70)
    said = [int(model.evaluate(torch.tensor([ids]), cache)[0, -1].argmax())]
    for _ in range(2):
        said.append(int(model.evaluate(torch.tensor([said[-1:]]), cache)[0, -1].argmax()))
    text, question = torch.tensor([ids[:50]]), torch.tensor([ids[50:]])
    wrong = [*said[:2], (said[2] + 1) % 448]
    for answer, is_right in ((said, True), (wrong, False)):
        for config in (None, retention_config("icecache", 70)):
            chats = Chats(model, 1, 70, config, 80)
            found = answers(chats, text, question, torch.tensor([answer]), 10)
            assert found.tolist() == [is_right]


def test_what_the_reference_cannot_compute_is_refused(tmp_path: Path) -> None:
    qwen = tmp_path / "qwen.gguf"
    make_random_gguf(qwen, Shape(2, 64, 2, 1, 64, 448, arch="qwen3"))
    with pytest.raises(ModelError, match="plain models of 'llama' only"):
        read_llama(qwen)
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(ModelError, match="not a readable GGUF"):
        read_llama(tmp_path / "text.gguf")
    model = Llama.load(bundled_model())
    with pytest.raises(ValueError, match="holds 3 positions"):
        model.evaluate(torch.tensor([[1, 2, 3, 4]]), model.cache(1, 3))
