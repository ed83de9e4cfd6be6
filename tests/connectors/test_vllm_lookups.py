"""What vLLM's scheduler waits for, and for how long: look-ups, the shared tier, and the tracing of a step. Needs no vLLM."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from store_tools import ROW_IDENTITY, write_all

from towerd.connectors.vllm import shared_rows
from towerd.connectors.vllm.operations import RowLoad, slots_of
from towerd.connectors.vllm.scheduler_side import SchedulerSide
from towerd.connectors.vllm.shared_rows import BucketBackoff, SharedRows
from towerd.connectors.vllm.slot_origins import SlotOrigins
from towerd.connectors.vllm.vllm_store import StoredPrefix
from towerd.errors import StoreError
from towerd.store import Store
from towerd.tiers.manager import Tiers
from towerd.tiers.shared.bucket import Bucket, open_bucket
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids, Provenance

BLOCK = 16
BLOCKS = 80
IDS = np.arange(1000, dtype=np.int32)
WAIT_S = 60.0


def eventually(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def request(id: str, n: int) -> Any:
    ids = list(range(n))
    return SimpleNamespace(
        request_id=id, prompt_token_ids=ids, all_token_ids=ids, num_prompt_tokens=n, mm_features=[],
        lora_request=None, prompt_embeds=None, pooling_params=None, cache_salt=None,
    )  # fmt: skip


def side_of(find: Callable[[Ids, str, int], StoredPrefix | None]) -> SchedulerSide:
    store: Any = SimpleNamespace(is_exact=True, shared=None, find=find)
    return SchedulerSide(store, BLOCK, 100, loads=True, saves=False)


def found(p0: int, p1: int) -> StoredPrefix:
    return StoredPrefix(p0, p1, (), np.zeros(p1 - p0, np.uint8))


def test_the_scheduler_waits_for_no_check() -> None:
    """One prompt's rows are read for ever; another's are known meanwhile. What vLLM got to have itself is not loaded."""
    may_end = threading.Event()

    def find(ids: Ids, scope: str, p0: int) -> StoredPrefix:
        if len(ids) == 99:
            may_end.wait()
        return found(p0, len(ids))

    side = side_of(find)
    slow, quick = request("slow", 100), request("quick", 50)
    assert side.n_matched(slow, 0) is None
    eventually(lambda: side.n_matched(quick, 0) == 49)
    assert side.n_matched(slow, 16) is None
    may_end.set()
    eventually(lambda: side.n_matched(slow, 16) == 83)
    assert side.n_matched(slow, 99) == 0
    side.close()


@pytest.mark.parametrize("error", [StoreError("the disk is gone"), ValueError("what is that")])
def test_an_error_of_the_store_costs_a_prompt_its_rows(error: Exception) -> None:
    def find(ids: Ids, scope: str, p0: int) -> StoredPrefix:
        raise error

    side = side_of(find)
    eventually(lambda: side.n_matched(request("a", 50), 0) is not None)
    assert side.n_matched(request("a", 50), 0) == 0
    side.close()


# --- the shared tier ------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", ROW_IDENTITY) as store:
        yield store


def tiers_of(store: Store) -> Tiers:
    return Tiers(
        store, ROW_IDENTITY.layout, v_trans=False, hot_bytes=1 << 20, warm_bytes=1 << 30, policy="lru",
        shrink_after_s=-1.0,
    )  # fmt: skip


@pytest.fixture
def shared(store: Store, tmp_path: Path) -> Iterator[Callable[[Bucket], SharedRows]]:
    tiers, made = tiers_of(store), []

    def make(bucket: Bucket) -> SharedRows:
        made.append(SharedRows(SharedTier(store, bucket, bytes(32), "near", has_rows=True), tiers))
        return made[-1]

    yield make
    for each in made:
        each.close()
    tiers.close()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket whose server takes every connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name, value in {
            "ENDPOINT": host, "ALLOW_HTTP": "true", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b",
            "REGION": "us-east-1",
        }.items():  # fmt: skip
            monkeypatch.setenv(f"AWS_{name}", value)
        yield open_bucket("s3://bucket/prefix")


def test_a_silent_bucket_costs_one_wait(
    shared: Callable[[Bucket], SharedRows], silent: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that ask at once wait side by side; later ones do not."""
    monkeypatch.setattr(shared_rows, "FIRST_WAIT_S", 0.05)
    rows = shared(silent)
    names = ["a", "b", "c"]
    assert [rows.has_fetched(name, IDS, "local", 0) for name in names] == [None, None, None]
    eventually(lambda: all(rows.has_fetched(name, IDS, "local", 0) is False for name in names))
    assert rows.has_fetched("d", IDS, "local", 0) is False
    silent.close()


def test_a_prompt_waits_no_longer_than_it_takes_to_evaluate(
    shared: Callable[[Bucket], SharedRows], silent: Bucket
) -> None:
    rows = shared(silent)
    rows.evaluated(64, 64 / 1e6)  # a million tokens a second
    eventually(lambda: rows.has_fetched("a", IDS, "local", 0) is False)
    assert rows.has_fetched("b", IDS, "local", 0) is False
    silent.close()


def test_a_bucket_that_fails_is_asked_ever_more_rarely() -> None:
    """From 10 seconds to 10 minutes; what was asked before a failure is no other one. Once it works it is as before."""
    now = 100.0
    backoff = BucketBackoff(lambda: now)
    for span_s in (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0):
        assert backoff.is_over()
        assert backoff.failed(now)
        assert not backoff.failed(now - 1)
        now += span_s - 1
        assert not backoff.is_over()
        now += 2
    backoff.worked()
    assert backoff.failed(now)
    now += 10
    assert backoff.is_over()


def aged(folder: Path, hours: float) -> None:
    """As if all in the bucket had been put so long ago."""
    for path in folder.rglob("*"):
        if path.is_file():
            then = path.stat().st_mtime - hours * 3600
            os.utime(path, (then, then))


def test_what_an_engine_put_stays_while_it_is_used(
    store: Store, shared: Callable[[Bucket], SharedRows], tmp_path: Path
) -> None:
    """The collector leaves it; by age it takes what no engine loaded for a day."""
    used, unused, folder = IDS, IDS + 5000, tmp_path / "bucket"
    for ids in (used, unused):
        write_all(store, store.insert(ids, "local", [len(ids)])[-1])
    bucket = open_bucket(f"file://{folder}")
    rows = shared(bucket)
    rows.put(used, "local")
    rows.put(unused, "local")
    rows.close()
    tier = SharedTier(store, open_bucket(f"file://{folder}"), bytes(32), "near", has_rows=True)

    def has(ids: Ids) -> bool:
        mark = tier.find(ids, "local", 0)
        if mark is None:
            return False
        return all(tier.bucket.has(f"objects/{name}/0000") for name in mark.put.objects)

    assert has(used)
    assert has(unused)
    for _ in range(3):
        aged(folder, 9)
        tier.collector().run()
    assert has(used)
    assert has(unused)
    later = shared(open_bucket(f"file://{folder}"))
    later.used(used, "local")
    later.close()
    for _ in range(4):
        tier.collector().run(timedelta(days=1))
        aged(folder, 2)
    assert has(used)
    assert not has(unused)


# --- tracing --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_traced_as_if_all_were_looked_at(seed: int) -> None:
    """Random steps: requests with and without loads, on blocks of others, also on such as are computed in the same step;
    some are preempted, and come back on other blocks."""
    random = np.random.default_rng(seed)
    origins, expected = SlotOrigins(BLOCKS, BLOCK), np.zeros(BLOCKS * BLOCK, np.uint8)
    blocks: dict[str, list[int]] = {}
    n_rows: dict[str, int] = {}
    for number in range(60):
        planned = _planned(random, blocks, n_rows, origins)
        begun, resumed, loads = [], set(), []
        for id in [str(number), *(id for id in planned if random.random() < 0.1)]:
            before = _take_blocks(random, id, blocks, planned)
            if id in planned:
                resumed.add(id)
            if random.random() < 0.3:
                slots = slots_of(blocks[id], before, before + 10, BLOCK)
                provenance = random.integers(0, 3, 10).astype(np.uint8)
                loads.append((RowLoad((), slots, frozenset()), provenance))
                before += 10
            planned[id] = before, before + int(random.integers(5, 40))
            begun.append(id)
        cached = [id for id in planned if id != str(number)]
        step = SimpleNamespace(
            kv_cache_block_copies=None,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached,
                num_computed_tokens=[planned[id][0] for id in cached],
                resumed_req_ids=resumed,
            ),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=str(number), num_computed_tokens=planned[str(number)][0])
            ],
            num_scheduled_tokens={id: after - before for id, (before, after) in planned.items()},
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda id: (blocks[id],)),
        )
        origins.trace(step, loads)
        for load, provenance in loads:
            expected[load.slots] = provenance
        for _ in planned:  # until each has seen what all others computed
            for id, (before, after) in planned.items():
                slots = slots_of(blocks[id], 0, after, BLOCK)
                is_exact = not expected[slots[:before]].any()
                expected[slots[before:]] = Provenance.EXACT if is_exact else Provenance.DERIVED
        n_rows |= {id: after for id, (_, after) in planned.items()}
        for id in blocks:
            slots = slots_of(blocks[id], 0, n_rows[id], BLOCK)
            assert np.array_equal(origins.of(slots), expected[slots])


def _planned(
    random: np.random.Generator,
    blocks: dict[str, list[int]],
    n_rows: dict[str, int],
    origins: SlotOrigins,
) -> dict[str, tuple[int, int]]:
    """The requests that continue, with their rows before and after; some end first."""
    for id in list(blocks):
        if random.random() < 0.1 or n_rows[id] > 6 * BLOCK or len(blocks) > 6:
            del blocks[id], n_rows[id]
            origins.forget(id)
    return {id: (n, n + int(random.integers(1, 20))) for id, n in n_rows.items()}


def _take_blocks(
    random: np.random.Generator,
    id: str,
    blocks: dict[str, list[int]],
    planned: dict[str, tuple[int, int]],
) -> int:
    """Give a request blocks: maybe whole ones of another, which it has the rows of, and free ones. Returns how many
    rows it has."""
    blocks.pop(id, None)
    free = [each for each in range(BLOCKS) if not any(each in of for of in blocks.values())]
    common: list[int] = []
    if blocks and random.random() < 0.7:
        other = str(random.choice([*blocks]))
        common = blocks[other][: min(3, planned[other][1] // BLOCK)]
    blocks[id] = [*common, *random.permutation(free).tolist()][:8]
    return len(common) * BLOCK
