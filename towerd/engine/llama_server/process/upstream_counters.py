"""Subtracts what towerd's own requests added to llama-server's counters.

The probe at the start evaluates a few tokens, which should not appear in
`llamacpp:prompt_tokens_total`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

_COUNTER = re.compile(rb"^# TYPE (\S+) counter$", re.MULTILINE)
_SAMPLE = re.compile(rb"^([^#\s{]\S*) ([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?)$", re.MULTILINE)

CounterValues = Mapping[bytes, Decimal]


def counters(metrics: bytes) -> dict[bytes, Decimal]:
    """The counters without labels in a Prometheus text, by name."""
    names = set(_COUNTER.findall(metrics))
    found = _SAMPLE.findall(metrics)
    return {name: Decimal(value.decode()) for name, value in found if name in names}


def difference(after: CounterValues, before: CounterValues) -> dict[bytes, Decimal]:
    """The growth of each counter that grew."""
    grown = {name: value - before.get(name, Decimal(0)) for name, value in after.items()}
    return {name: value for name, value in grown.items() if value > 0}


def without(metrics: bytes, added: CounterValues) -> bytes:
    """The text with `added` subtracted. A smaller counter was reset, and is left as it is."""

    def less(sample: re.Match[bytes]) -> bytes:
        name, value = sample[1], Decimal(sample[2].decode())
        rest = value - added.get(name, Decimal(0))
        return b"%s %s" % (name, format(rest if rest >= 0 else value, "f").encode())

    return _SAMPLE.sub(less, metrics) if added else metrics
