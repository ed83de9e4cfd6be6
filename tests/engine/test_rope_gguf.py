"""GgufKeys: every type of key that ggml reads, small tensors, and files that are none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter

from lab.models.gguf_file import writing
from towerd.model.gguf_keys import GgufKeys

VALUES: dict[str, tuple[GGUFValueType, Any]] = {
    "u8": (GGUFValueType.UINT8, 200),
    "i8": (GGUFValueType.INT8, -100),
    "u16": (GGUFValueType.UINT16, 60000),
    "i16": (GGUFValueType.INT16, -30000),
    "u32": (GGUFValueType.UINT32, 4_000_000_000),
    "i32": (GGUFValueType.INT32, -2_000_000_000),
    "f32": (GGUFValueType.FLOAT32, 0.5),
    "bool": (GGUFValueType.BOOL, True),
    "u64": (GGUFValueType.UINT64, 1 << 63),
    "i64": (GGUFValueType.INT64, -(1 << 62)),
    "f64": (GGUFValueType.FLOAT64, 0.1),
    "text": (GGUFValueType.STRING, "żółw"),
}


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[GgufKeys]:
    path = tmp_path / "keys.gguf"
    with writing(path, "llama") as writer:
        for name, (kind, value) in VALUES.items():
            writer.add_key_value(name, value, kind)
        writer.add_array("numbers", [1.5, 2.5])
        writer.add_array("flags", [True, False])
        writer.add_array("words", ["a", "b"])
        _add_tensors(writer)
    opened = GgufKeys(path)
    yield opened
    opened.close()


def _add_tensors(writer: GGUFWriter) -> None:
    writer.add_tensor("first", np.arange(5, dtype=np.float32))
    writer.add_tensor("half", np.arange(5, dtype=np.float16))
    writer.add_tensor("last", np.arange(5, 9, dtype=np.float32))


@pytest.mark.parametrize("name", list(VALUES))
def test_scalars(keys: GgufKeys, name: str) -> None:
    value = VALUES[name][1]
    assert keys.get(name) == value
    assert type(keys.get(name)) is type(value)


def test_lists(keys: GgufKeys) -> None:
    assert keys.get("numbers") == [1.5, 2.5]
    assert keys.get("flags") == [True, False]
    assert keys.get("words") is None
    assert keys.get("words", "none") == "none"


def test_missing_keys(keys: GgufKeys) -> None:
    assert keys.get("absent") is None
    assert keys.get("absent", 7) == 7


def test_tensors(keys: GgufKeys) -> None:
    assert keys.floats("first") == (0.0, 1.0, 2.0, 3.0, 4.0)
    assert keys.floats("last") == (5.0, 6.0, 7.0, 8.0)
    assert keys.floats("half") is None
    assert keys.floats("absent") is None


@pytest.mark.parametrize("data", [b"", b"GGUF", b"not a model", b"GGUF" + b"\xff" * 64])
def test_files_that_are_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="not a readable GGUF"):
        GgufKeys(path)


def test_closing_twice(keys: GgufKeys) -> None:
    keys.close()
    keys.close()
