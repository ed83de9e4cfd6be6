"""Retention policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from towerd.retention.base import Retention, RetentionConfig, Signal
from towerd.retention.buzz import Buzz, BuzzConfig
from towerd.retention.h2o import H2O, H2OConfig
from towerd.retention.icecache import IceCache, IceCacheConfig
from towerd.retention.latem import Latem, LatemConfig
from towerd.retention.none import KeepAll, NoneConfig
from towerd.retention.snapkv import SnapKV, SnapKVConfig
from towerd.retention.streaming import Streaming, StreamingConfig
from towerd.retention.window import Window, WindowConfig


class Kind(NamedTuple):
    """One row of the table: the parameters and what decides by them."""

    config: type[RetentionConfig]
    policy: type[Retention]


KINDS: Mapping[str, Kind] = {
    "none": Kind(NoneConfig, KeepAll),
    "window": Kind(WindowConfig, Window),
    "streaming": Kind(StreamingConfig, Streaming),
    "h2o": Kind(H2OConfig, H2O),
    "snapkv": Kind(SnapKVConfig, SnapKV),
    "buzz": Kind(BuzzConfig, Buzz),
    "latem": Kind(LatemConfig, Latem),
    "icecache": Kind(IceCacheConfig, IceCache),
}
NAMES = tuple(KINDS)


def retention_config(name: str, budget: int) -> RetentionConfig:
    """The parameters of policy `name` for `budget` live tokens. Raises ValueError for an unknown
    name or a budget that leaves no room beside sink and window."""
    if name not in KINDS:
        raise ValueError(f"there is no retention policy {name!r}: take one of {', '.join(NAMES)}")
    try:
        return KINDS[name].config.for_budget(budget)
    except ValueError as error:
        raise ValueError(f"a budget of {budget} tokens is too small for {name}: {error}") from error


def signals_of(name: str) -> frozenset[Signal]:
    """What a view for policy `name` must bring. Raises KeyError for an unknown name."""
    return KINDS[name].policy.signals


def can_recall(name: str) -> bool:
    """Whether what policy `name` dropped may come back. Raises KeyError for an unknown name."""
    return KINDS[name].policy.can_recall


def open_retention(config: RetentionConfig) -> Retention:
    """A policy with these parameters, for one chat."""
    for kind in KINDS.values():
        if isinstance(config, kind.config):
            make: Callable[[Any], Retention] = kind.policy
            return make(config)
    raise ValueError(f"no retention policy has parameters of type {type(config).__name__}")
