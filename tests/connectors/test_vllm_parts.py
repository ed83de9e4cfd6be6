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
from towerd.connectors.vllm.scheduler_side import scope_of_request
from towerd.connectors.vllm.settings import ConnectorSettings
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


def test_the_daemon_imports_no_vllm() -> None:
    """Nor does the connector's package, until the connector itself is asked for."""
    code = (
        "import sys, towerd.app.daemon, towerd.connectors.vllm; assert 'vllm' not in sys.modules; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
