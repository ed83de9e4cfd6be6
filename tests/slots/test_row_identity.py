"""The row identity: every field counts, and its digest is stable for ever."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.row_identity import RowIdentity

BASE: dict[str, Any] = {
    "model_hash": "ab" * 32,
    "arch": "llama",
    "tokenizer": "spm",
    "rope": {"freq_base": 10000.0, "scaling": "none"},
    "lora": ("adapter@1.0",),
    "layout": KVLayout((Plane(1, 128),), (Plane(1, 128),)),
    "rot_k": False,
    "rot_v": False,
    "long_context": False,
    "format_version": 3,
}
OTHERS: dict[str, tuple[str, Any]] = {
    "model_hash": ("model_hash", "cd" * 32),
    "arch": ("arch", "qwen2"),
    "tokenizer": ("tokenizer", "bpe"),
    "rope.freq_base": ("rope", {"freq_base": 10000.5, "scaling": "none"}),
    "rope.scaling": ("rope", {"freq_base": 10000.0}),
    "lora": ("lora", ()),
    "layout": ("layout", KVLayout((Plane(1, 128),), (Plane(8, 68),))),
    "rot_k": ("rot_k", True),
    "rot_v": ("rot_v", True),
    "long_context": ("long_context", True),
    "format_version": ("format_version", 4),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_field_counts(name: str) -> None:
    """A change of any field changes equality and digest."""
    field, value = OTHERS[name]
    one, two = RowIdentity(**BASE), RowIdentity(**(BASE | {field: value}))
    assert one != two
    assert one.digest() != two.digest()


def test_equal() -> None:
    """Order and number type of RoPE parameters do not matter; JSON keeps everything."""
    one = RowIdentity(**BASE)
    two = RowIdentity(**(BASE | {"rope": {"scaling": "none", "freq_base": 10000}}))
    three = RowIdentity.from_json(json.loads(json.dumps(one.to_json())))
    for other in (two, three, dataclasses.replace(one)):
        assert one == other
        assert hash(one) == hash(other)
        assert one.digest() == other.digest()


def test_digest_is_fixed() -> None:
    """Stores on disk depend on this value: a change must raise the store's version."""
    expected = "ff69fa4e4d688ff2c276cd4de76d58476f04cbb9ca1a78a701b61d42ab232df2"
    assert RowIdentity(**BASE).digest().hex() == expected


def test_immutable() -> None:
    """Neither fields nor the mapping can be changed, not even through the caller's dict."""
    rope = {"freq_base": 1.0}
    row_identity = RowIdentity(**(BASE | {"rope": rope}))
    rope["freq_base"] = 2.0
    assert row_identity.rope["freq_base"] == 1.0
    with pytest.raises(TypeError):
        row_identity.rope["x"] = 1.0  # type: ignore[index]


BAD: dict[str, Any] = {
    "model_hash": 5,
    "arch": None,
    "rope": [("freq_base", 1.0)],
    "lora": ["a"],
    "layout": {"k": []},
    "rot_k": 1,
    "long_context": "no",
    "format_version": 3.0,
}


@pytest.mark.parametrize("name", BAD)
def test_bad_fields(name: str) -> None:
    """Wrong types are refused."""
    with pytest.raises(StateError):
        RowIdentity(**(BASE | {name: BAD[name]}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, None, 10**400, [1.0]])
def test_bad_rope_values(value: object) -> None:
    """RoPE parameters are finite numbers or strings."""
    with pytest.raises(StateError):
        RowIdentity(**(BASE | {"rope": {"freq_base": value}}))


@pytest.mark.parametrize(
    "change", [{"lora": "ab"}, {"layout": None}, {"rope": {"a": None}}, {"extra": 1}, {"arch": 7}]
)
def test_bad_json(change: dict[str, Any]) -> None:
    """Unknown keys and wrong types in stored JSON are refused."""
    with pytest.raises(StateError):
        RowIdentity.from_json(RowIdentity(**BASE).to_json() | change)
    values: list[object] = [None, [], "x", {}]
    for value in values:
        with pytest.raises(StateError):
            RowIdentity.from_json(value)
