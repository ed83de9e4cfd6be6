"""The connector below a real vLLM: a model of random weights made on the spot, on the CPU, the engine in processes
of its own. `make vllm` runs this where vLLM is installed; TOWERD_VLLM_PYTHON names its interpreter.

The oracle is vLLM without a connector: float32 rows, so that what differs by the order of sums stays small."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.bench.vllm.engine_client import VllmEngine, VllmFailed, transfer_config
from lab.models.hf_llama import LlamaShape, write_hf_llama
from towerd import tower_file
from towerd.store import Store, latest_row_identity

PYTHON = os.environ.get("TOWERD_VLLM_PYTHON", sys.executable)
TOKENS = 700
BLOCK = 128
"""vLLM's on a CPU; none of the lengths here is a multiple of it."""
ROW_BYTES = 4 * 2 * 2 * 64 * 4
"""Of a token: 4 layers, K and V, 2 heads of 64 channels, float32."""
NOISE = 1e-4
"""Of a logprob, between evaluating a prompt at once and in two parts."""
WAIT_S = 120.0
TOWER_FILE = Path(__file__).parents[1] / "tower_files" / "version-2-spelled.tower"


def _has_vllm() -> bool:
    return subprocess.run([PYTHON, "-c", "import vllm"], capture_output=True).returncode == 0


@pytest.fixture(scope="module", autouse=True)
def _needs_vllm() -> None:
    if not _has_vllm():
        pytest.skip("vLLM is not installed here: make vllm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_llama(tmp_path_factory.mktemp("model"), LlamaShape())


Start = Callable[..., VllmEngine]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts an engine of one process; `store` is the name of its store, None: it has no connector."""
    running: list[VllmEngine] = []

    def begin(
        store: str | None = "store",
        processes: bool = False,
        model: Path = model,
        **settings: Any,
    ) -> VllmEngine:
        arguments: dict[str, Any] = {"max_model_len": 2048, "dtype": "float32"}
        if store is not None:
            extra = {"towerd.store_dir": str(tmp_path / store), **settings}
            arguments["kv_transfer_config"] = transfer_config(extra)
        one = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0"}
        running.append(VllmEngine(PYTHON, model, one, **arguments))
        return running[-1]

    yield begin
    for engine in running:
        engine.stop()


def some_ids(n: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 1000) for _ in range(n)]


def eventually(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "segments").glob("*.twr"))


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def check_sound(folder: Path) -> Store:
    """Open the store alone; every file and the catalog must be sound."""
    store = Store.open(folder, latest_row_identity)
    report = store.verify()
    assert report.ok
    store.check_integrity()
    return store


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same tokens, and logprobs that differ by no more than vLLM's noise."""
    assert found["tokens"] == expected["tokens"]
    for ours, theirs in zip(found["logprobs"], expected["logprobs"], strict=True):
        for token in ours.keys() & theirs.keys():
            assert abs(ours[token] - theirs[token]) < NOISE


def test_stored_prefixes_of_any_length_answer_as_evaluated_ones(
    start: Start, tmp_path: Path
) -> None:
    """Also after a restart, and for a fork inside of a block; the reply is stored, too."""
    ids = some_ids(TOKENS)
    prompts = [ids, ids[:333], ids[:201] + some_ids(90, 1)]
    options = {"max_tokens": 20, "logprobs": 3}
    with start(None) as plain:
        expected = [plain.ask(prompt, **options) for prompt in prompts]
        longer = ids + expected[0]["tokens"] + some_ids(5, 2)
        expected_longer = plain.ask(longer, **options)
    with start() as engine:
        assert engine.ask(ids, **options)["cached"] == 0
        found = [engine.ask(prompt, **options) for prompt in prompts]
        assert [each["cached"] for each in found] == [TOKENS - 1, 332, 201]
        for each, same in zip(found, expected, strict=True):
            assert_same(each, same)
    with start() as again:
        found = [again.ask(prompt, **options) for prompt in prompts[:2]]
        assert [each["cached"] for each in found] == [TOKENS - 1, 332]
        found.append(again.ask(longer, **options))
        assert found[-1]["cached"] == TOKENS + 19  # the last token of the reply was never evaluated
        for each, same in zip(found, [*expected[:2], expected_longer], strict=True):
            assert_same(each, same)
    check_sound(tmp_path / "store").close()


def test_scheduler_and_worker_in_two_processes(start: Start, tmp_path: Path) -> None:
    """As `vllm serve` runs them on a CPU. Killed, it leaves a sound store that the next one uses."""
    ids, options = some_ids(TOKENS), {"max_tokens": 12, "logprobs": 3}
    engine = start(processes=True)
    expected = engine.ask(ids, **options)
    assert_same(engine.ask(ids, **options), expected)
    eventually(lambda: stored_bytes(tmp_path / "store") > TOKENS * ROW_BYTES)
    os.killpg(engine.process.pid, signal.SIGKILL)
    engine.stop()
    eventually(lambda: _is_free(tmp_path / "store"))
    with start() as again:
        found = again.ask(ids, **options)
        assert found["cached"] == TOKENS - 1
        assert_same(found, expected)


def _is_free(folder: Path) -> bool:
    from towerd.errors import StoreLocked

    try:
        check_sound(folder).close()
    except StoreLocked:
        return False
    return True


def test_killed_while_it_saves(start: Start, tmp_path: Path) -> None:
    """Whatever the moment, the store opens and every row in it is whole."""
    engine = start()
    n = 0
    while not files(tmp_path / "store"):
        engine.ask(some_ids(TOKENS, n))
        n += 1
    engine.ask(some_ids(1500, n))
    os.killpg(engine.process.pid, signal.SIGKILL)
    engine.stop()
    store = check_sound(tmp_path / "store")
    assert store.files()
    store.close()


def test_tenants_share_nothing(start: Start, tmp_path: Path) -> None:
    """Nor does the store name their salts."""
    ids = some_ids(TOKENS)
    with start() as engine:
        assert [engine.ask(ids, salt="alice's")["cached"] for _ in range(2)] == [0, TOKENS - 1]
        assert engine.ask(ids, salt="bob's")["cached"] == 0
        assert engine.ask(ids)["cached"] == 0
        assert engine.ask(ids, salt="bob's")["cached"] == TOKENS - 1
    with check_sound(tmp_path / "store") as store:
        scopes = {node.scope for node in store.nodes()}
        assert len(scopes) == 3
        assert not any("alice" in scope or "bob" in scope for scope in scopes)


def test_a_damaged_file_costs_rows_not_the_answer(start: Start, tmp_path: Path) -> None:
    ids, options = some_ids(TOKENS), {"max_tokens": 8, "logprobs": 3}
    with start() as engine:
        expected = engine.ask(ids, **options)
    for path in files(tmp_path / "store"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    with start() as again:
        found = [again.ask(ids, **options) for _ in range(2)]
        assert [each["cached"] for each in found] == [0, TOKENS - 1]
        for each in found:
            assert_same(each, expected)


def test_stored_formats_take_less_and_are_never_taken_for_exact(
    start: Start, tmp_path: Path
) -> None:
    """q8h at a quarter of float32; an exact engine on the same store evaluates instead."""
    ids, options = some_ids(1500), {"max_tokens": 8, "logprobs": 3}
    folder = tmp_path / "store"
    quick = {"towerd.format": "q8h", "towerd.format_after_s": 0}
    with start(**quick) as engine:
        exact = engine.ask(ids, **options)
        eventually(lambda: 0 < stored_bytes(folder) < 0.45 * len(ids) * ROW_BYTES)
    with start(**quick) as again:
        found = again.ask(ids, **options)
        assert found["cached"] == len(ids) - 1
        token = str(exact["tokens"][0])
        assert found["tokens"][0] == exact["tokens"][0]
        assert abs(found["logprobs"][0][token] - exact["logprobs"][0][token]) < 0.2
    with start() as precise:
        found = precise.ask(ids, **options)
        assert found["cached"] < 128  # its first rows alone are native
        assert_same(found, exact)
        eventually(lambda: precise.ask(ids)["cached"] == len(ids) - 1)


def test_engines_share_a_bucket(start: Start, tmp_path: Path) -> None:
    """Another engine with a store of its own has the rows of the first, with the same key."""
    ids, options = some_ids(TOKENS), {"max_tokens": 8, "logprobs": 3}
    key = tmp_path / "shared.key"
    key.write_text("07" * 32)
    key.chmod(0o600)
    where = {"towerd.shared": f"file://{tmp_path}/bucket", "towerd.shared_key": str(key)}
    with start("one", **where) as engine:
        expected = engine.ask(ids, **options)
    assert [*(tmp_path / "bucket" / "towers").glob("*/*")]  # what `towerctl shared gc` asks for
    with start("two", **where) as other:
        found = other.ask(ids, **options)
        assert found["cached"] >= TOKENS // 256 * 256
        assert_same(found, expected)


def test_the_tokens_of_a_laptops_chat_are_a_prompt(start: Start, tmp_path: Path) -> None:
    """A `.tower` file of llama.cpp's chat: its ids continue in a vLLM with its vocabulary, and are stored there."""
    history = tower_file.read(TOWER_FILE.read_bytes()).history
    ids = history.ids(history.leaf).tolist()
    wide = write_hf_llama(tmp_path / "wide", LlamaShape(vocab=max(ids) + 1))
    with start(model=wide) as engine:
        found = [engine.ask(ids, max_tokens=4) for _ in range(2)]
    assert [each["cached"] for each in found] == [0, len(ids) - 1]
    assert found[0]["tokens"] == found[1]["tokens"]


def test_what_it_cannot_do_is_said(start: Start) -> None:
    """A setting that is none; a store that another engine has."""
    with pytest.raises(VllmFailed, match=r"towerd\.stor is no setting of the connector"):
        start(**{"towerd.stor": "x"})
    with start(), pytest.raises(VllmFailed, match=r"A store has one vLLM engine"):
        start()
