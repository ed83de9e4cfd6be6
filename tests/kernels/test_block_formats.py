"""The table of formats: ids and sizes that files rely on, and what stays out of contexts."""

from __future__ import annotations

import pytest

from lab.reference.blocks import CODES
from towerd.kernels.formats import (
    BY_NAME,
    BY_TYPE,
    CACHE_FORMATS,
    CACHE_TYPES,
    FORMATS,
    STORED_FORMATS,
)
from towerd.settings.config import CACHE_TYPES as CONFIG_CACHE_TYPES

IN_FILES = {
    256: ("q8", 34), 257: ("q8h", 34), 258: ("q6", 26), 259: ("q6h", 26),
    260: ("q5", 22), 261: ("q5h", 22), 262: ("q4", 18), 263: ("q4h", 18),
    264: ("q8a", 36), 265: ("q8ah", 36), 266: ("q6a", 28), 267: ("q6ah", 28),
    268: ("q5a", 24), 269: ("q5ah", 24), 270: ("q4a", 20), 271: ("q4ah", 20),
}  # fmt: skip


def test_stored_ids_and_sizes_never_change() -> None:
    """Segment files written by any version name formats by these ids."""
    assert {row.type_id: (row.name, row.block_bytes) for row in STORED_FORMATS} == IN_FILES
    assert len(BY_TYPE) == len(BY_NAME) == len(FORMATS)


def test_stored_formats_are_no_cache_types() -> None:
    """Neither a context nor a setting can be given one."""
    assert set(CONFIG_CACHE_TYPES) == {row.name for row in CACHE_FORMATS}
    assert {row.type_id for row in CACHE_FORMATS} == CACHE_TYPES
    assert all(row.ggml_type == row.type_id < 256 for row in CACHE_FORMATS)
    for row in STORED_FORMATS:
        assert not row.is_cache_type
        assert row.type_id not in CACHE_TYPES
        with pytest.raises(ValueError, match=f"format: {row.name} is a stored format"):
            _ = row.ggml_type


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_codes(row: object) -> None:
    """Every quantized format has a block code of its size, shared with its plain twin."""
    found = BY_NAME[getattr(row, "name", "")]
    if not found.is_quantized:
        assert found.codec == found.name
        assert not found.is_hadamard
        return
    code = CODES[found.codec]
    assert code.block_bytes == found.block_bytes
    assert found.bits_per_value == code.bits + (1.0 if code.asymmetric else 0.5)
    assert found.is_hadamard == (not found.is_cache_type and found.name.endswith("h"))


@pytest.mark.parametrize(("n", "block"), [(32, 32), (64, 64), (96, 32), (128, 64), (4096, 64)])
def test_hadamard_block(n: int, block: int) -> None:
    """The longest run of 32 or 64 that divides the row."""
    assert BY_NAME["q4h"].hadamard_block(n) == block
    assert BY_NAME["q4"].hadamard_block(n) == BY_NAME["q4_0"].hadamard_block(n) == 0
    with pytest.raises(ValueError, match="n_elements"):
        BY_NAME["q4h"].hadamard_block(n + 1)
