"""Parts of the connector that need no vLLM: settings, and the order of numbers in a cache, which is learned."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from towerd.connectors.vllm.cache_rows import CacheRows, NotLearned
from towerd.connectors.vllm.model import layer_specs, layout_of, row_identity
from towerd.connectors.vllm.operations import ReadPlanes, RowLoad, RowSave, StoredPlanes
from towerd.connectors.vllm.scheduler_side import SchedulerSide, scope_of_request
from towerd.connectors.vllm.settings import ConnectorSettings
from towerd.connectors.vllm.vllm_store import StoredPrefix
from towerd.connectors.vllm.worker_side import WorkerSide
from towerd.errors import ConfigError

BLOCKS, HEADS, TOKENS, SIZE = 5, 2, 32, 64


def tokens_first(cache: Any, slot: int, k: Any, v: Any) -> None:
    """As on a GPU: a token's K and V of a head lie side by side."""
    block, place = divmod(slot, TOKENS)
    cache[block, :, place, :SIZE] = k
    cache[block, :, place, SIZE:] = v


def channels_first(cache: Any, slot: int, k: Any, v: Any) -> None:
    """As on a CPU: the keys of a block channel by channel, then its values token by token."""
    block, place = divmod(slot, TOKENS)
    halves = cache.view(len(cache), HEADS, 2, TOKENS * SIZE)
    halves[block, :, 0].view(HEADS, SIZE, TOKENS)[:, :, place] = k
    halves[block, :, 1].view(HEADS, TOKENS, SIZE)[:, place] = v


def tiles(cache: Any, slot: int, k: Any, v: Any) -> None:
    """As for matrix units: tiles of 16 tokens, pairs of channels side by side."""
    block, place = divmod(slot, TOKENS)
    halves = cache.view(len(cache), HEADS, 2, TOKENS * SIZE)
    keys = halves[block, :, 0].view(HEADS, TOKENS // 16, SIZE // 2, 16, 2)
    keys[:, place // 16, :, place % 16] = k.view(HEADS, SIZE // 2, 2)
    values = halves[block, :, 1].view(HEADS, TOKENS // 2, SIZE, 2)
    values[:, place // 2, :, place % 2] = v


Put = Callable[[Any, int, Any, Any], None]


def updating(put: Put) -> Callable[[Any, Any, Any, Any], None]:
    def update(key: Any, value: Any, cache: Any, slots: Any) -> None:
        for i, slot in enumerate(slots.tolist()):
            put(cache, slot, key[i], value[i])

    return update


@pytest.mark.parametrize("put", [tokens_first, channels_first, tiles])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_are_read_and_written_where_the_backend_has_them(put: Put, dtype: Any) -> None:
    """Any slots, in any order; what is written is what the backend would have written, and no more."""
    update = updating(put)
    random = torch.Generator().manual_seed(1)
    cache = torch.randn((BLOCKS, HEADS, TOKENS, 2 * SIZE), generator=random).to(dtype)
    before = cache.clone()
    rows = CacheRows(cache, HEADS, SIZE, SIZE, update)
    slots = np.random.default_rng(1).permutation(BLOCKS * TOKENS)[:50].astype(np.int64)
    k, v = torch.randn((2, 50, HEADS, SIZE), generator=random).to(dtype)
    update(k, v, before, torch.from_numpy(slots))
    as_bytes = [each.reshape(50, -1).contiguous().view(torch.uint8) for each in (k, v)]
    rows.write(slots, *as_bytes)
    assert torch.equal(cache, before)
    assert all(map(torch.equal, rows.read(slots), as_bytes))


def test_a_cache_that_does_not_keep_rows_as_they_are_is_refused() -> None:
    def rounded(cache: Any, slot: int, k: Any, v: Any) -> None:
        tokens_first(cache, slot, k // 2, v)

    with pytest.raises(NotLearned):
        CacheRows(
            torch.zeros((BLOCKS, HEADS, TOKENS, 2 * SIZE)), HEADS, SIZE, SIZE, updating(rounded)
        )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "towerd.store_dir"),
        ({"towerd.store_dir": 3}, "must be a path"),
        ({"towerd.store": "x"}, "no setting of the connector"),
        ({"towerd.store_dir": "x", "towerd.format": "q9"}, "q9"),
        ({"towerd.store_dir": "x", "towerd.format_after_s": -1}, "number of seconds"),
        ({"towerd.store_dir": "x", "towerd.warm_bytes": "much"}, "must be a size"),
        ({"towerd.store_dir": "x", "towerd.hot_bytes": -1}, "must not be negative"),
        ({"towerd.store_dir": "x", "towerd.shared": "bucket"}, "must be a URL"),
    ],
)
def test_a_bad_setting_gets_one_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ConnectorSettings.of(given)


def test_settings_of_other_connectors_are_theirs(tmp_path: Path) -> None:
    given = {"towerd.store_dir": str(tmp_path), "towerd.hot_bytes": "2MiB", "nixl.port": 5}
    found = ConnectorSettings.of(given)
    assert (found.store_dir, found.format, found.hot_bytes) == (tmp_path, "native", 2 << 20)


def request(**other: Any) -> Any:
    plain = {
        "mm_features": [], "lora_request": None, "prompt_embeds": None, "pooling_params": None,
        "prompt_token_ids": [1], "cache_salt": None,
    }  # fmt: skip
    return SimpleNamespace(**plain | other)


def test_a_salt_is_a_tenant_and_pictures_and_adapters_are_left_alone() -> None:
    scopes = [scope_of_request(request(cache_salt=salt)) for salt in (None, "a", "b", "public")]
    assert len(set(scopes)) == len(scopes)
    assert "public" not in scopes
    for name, value in {"mm_features": [1], "lora_request": 1, "prompt_embeds": 1}.items():
        assert scope_of_request(request(**{name: value})) is None


class FullAttentionSpec(SimpleNamespace):
    """vLLM's, as far as the connector reads it."""


def cache_config() -> Any:
    spec = FullAttentionSpec(
        dtype=torch.float32, num_kv_heads=HEADS, head_size=SIZE, head_size_v=SIZE, block_size=TOKENS,
        state_content_bytes=None, kv_quant_mode=SimpleNamespace(value=0),
    )  # fmt: skip
    tensors = [SimpleNamespace(layers=["model.0"])]
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], kv_cache_tensors=tensors
    )


def test_rows_computed_after_a_load_that_failed_are_not_handed_over() -> None:
    """Nor are those of the next step, which may have been planned before; later ones are."""
    update = updating(tokens_first)
    impl = SimpleNamespace(
        do_kv_cache_update=lambda layer, k, v, cache, slots: update(k, v, cache, slots)
    )
    worker = WorkerSide(cache_config(), lambda: {"model.0": SimpleNamespace(impl=impl)})
    worker.register({"model.0": torch.zeros((BLOCKS, HEADS, TOKENS, 2 * SIZE))})
    too_short = np.zeros((2, 3), np.uint8)
    damaged = StoredPlanes((too_short, too_short), ("f32", "f32"))
    slots = np.arange(2, dtype=np.int64)
    worker.start_load([RowLoad((damaged,), slots, frozenset({0}))])
    found = []
    for number in range(3):
        worker.finish_step([RowSave(number, slots, f"request {number}")])
        assert worker.failed_blocks() == (set() if number else {0})
        assert worker.take_ended() == {f"request {number}"}
        found += [(each.number, len(each.planes)) for each in worker.take_read()]
    worker.close()
    assert found == [(0, 0), (1, 0), (2, 2)]


def test_no_row_is_loaded_or_saved_after_the_caches_were_reset() -> None:
    """vLLM resets them when its weights may have changed. Rows that are being read are dropped."""
    saved: list[Any] = []
    store: Any = SimpleNamespace(
        is_exact=True, room_rows=100, shared=None, n_stored=lambda ids, scope: 0,
        find=lambda ids, scope, p0: StoredPrefix(p0, len(ids), (), np.zeros(len(ids) - p0, np.uint8)),
        save=lambda path, planes: saved.append(planes),
    )  # fmt: skip
    side = SchedulerSide(store, TOKENS, BLOCKS, loads=True, saves=True)
    ids = list(range(40))
    asked = request(request_id="a", prompt_token_ids=ids, all_token_ids=ids, num_prompt_tokens=40)
    step = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=0)],
        num_scheduled_tokens={"a": 40},
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda id: ([0, 1],)),
    )
    while (n_matched := side.n_matched(asked, 0)) is None:
        pass
    assert n_matched == 39
    planes = (np.zeros((40, 8), np.uint8),)
    (first,) = side.plan_step(step)[1]
    side.have_read([ReadPlanes(first.number, planes)])
    (second,) = side.plan_step(step)[1]
    side.stop()
    side.have_read([ReadPlanes(second.number, planes)])
    assert len(saved) == 1
    assert side.n_matched(asked, 0) == 0
    assert side.plan_step(step) == ([], [])


@pytest.mark.parametrize(("room", "n_saved"), [(100, 40), (30, 30), (10, 0)])
def test_what_waits_for_the_disk_is_bounded(room: int, n_saved: int) -> None:
    """Requests of one step with one prompt read its rows once, and no more of them than there is room for."""
    store: Any = SimpleNamespace(
        is_exact=True,
        room_rows=room,
        shared=None,
        n_stored=lambda ids, scope: 0,
    )
    side = SchedulerSide(store, TOKENS, BLOCKS, loads=False, saves=True)
    ids, names = list(range(40)), ["a", "b", "c"]
    for name in names:
        asked = request(request_id=name, prompt_token_ids=ids, all_token_ids=ids)
        asked.num_prompt_tokens = 40
        side.n_matched(asked, 0)
    step = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        scheduled_new_reqs=[SimpleNamespace(req_id=id, num_computed_tokens=0) for id in names],
        num_scheduled_tokens=dict.fromkeys(names, 40),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda id: ([0, 1],)),
    )
    saves = side.plan_step(step)[1]
    assert sum(len(save.slots) for save in saves) == n_saved


def test_rows_belong_to_what_vllm_computes_them_with(tmp_path: Path) -> None:
    """The greatest length chooses the factors of LongRoPE, and of nothing else; quantization has settings. Another vLLM
    may lay out weights, and so the channels of a row, in another order."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    memo: Any = SimpleNamespace(get_meta=lambda key: None, set_meta=lambda key, value: None)
    layout = layout_of(layer_specs(cache_config()))

    def known(
        rope: str = "default", length: int = 1024, settings: Any = None, version: str = "0.32.0"
    ) -> str:
        config = {"architectures": ["X"], "rope_scaling": {"rope_type": rope}}
        model = SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: config), dtype="float32", quantization="online",
            quantization_config=settings, model_impl="auto", max_model_len=length, seed=0,
            model=str(tmp_path), tokenizer=str(tmp_path), revision=None,
        )  # fmt: skip
        load = SimpleNamespace(load_format="auto", download_dir=None)
        engine = SimpleNamespace(model_config=model, load_config=load)
        return row_identity(engine, layout, memo, version).model_hash

    assert known(length=1024) == known(length=2048)
    assert known("longrope", 1024) != known("longrope", 2048)
    assert known(version="0.32.0") != known(version="0.32.1")
    assert known(settings={"linear": "fp8"}) != known(settings={"linear": "mxfp4"})


def test_the_daemon_imports_no_vllm() -> None:
    """Nor does the connector's package, until the connector itself is asked for."""
    code = (
        "import sys, towerd.app.daemon, towerd.connectors.vllm; assert 'vllm' not in sys.modules; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
