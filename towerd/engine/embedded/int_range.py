"""The GBNF of the decimal integers between two bounds."""

from __future__ import annotations

DIGITS_MAX = 16
"""Digits of an integer without a bound, as in the converter's own `integral-part`."""


def int_range_gbnf(low: int | None, high: int | None) -> str:
    """An expression that matches exactly the integers in [low, high], without leading zeros and
    without -0. None: no bound, which still means at most `DIGITS_MAX` digits or those of the
    other bound. ValueError if there is no such integer."""
    if low is not None and high is not None and low > high:
        raise ValueError(f"no integer is at least {low} and at most {high}")
    parts: list[str] = []
    if low is None or low < 0:
        nearest = 1 if high is None or high >= 0 else -high
        parts += [f'"-" ({part})' for part in _magnitudes(nearest, None if low is None else -low)]
    if high is None or high >= 0:
        parts += _magnitudes(max(0, low or 0), high)
    return " | ".join(parts)


def _magnitudes(low: int, high: int | None) -> list[str]:
    """Alternatives for the integers in [low, high], 0 <= low."""
    n_digits = len(str(low))
    parts: list[str] = []
    if high is None:
        parts += _same_length(str(low), "9" * n_digits)
        if n_digits < DIGITS_MAX:
            parts.append(f"[1-9] [0-9]{{{n_digits},{DIGITS_MAX - 1}}}")
        return parts
    while n_digits < len(str(high)):
        parts += _same_length(str(low), "9" * n_digits)
        low, n_digits = 10**n_digits, n_digits + 1
    return parts + _same_length(str(low), str(high))


def _same_length(low: str, high: str) -> list[str]:
    """Alternatives for the digit strings from `low` to `high`, which are equally long."""
    n = len(low)
    if n == 0:
        return [""]
    rest = n - 1
    if low[0] == high[0]:
        return [
            f"{_digit(low[0], low[0])} {tail}".strip() for tail in _same_length(low[1:], high[1:])
        ]
    first, last = int(low[0]), int(high[0])
    below: list[str] = []
    above: list[str] = []
    if low[1:] != "0" * rest:
        tails = _same_length(low[1:], "9" * rest)
        below = [f"{_digit(low[0], low[0])} {tail}" for tail in tails]
        first += 1
    if high[1:] != "9" * rest:
        tails = _same_length("0" * rest, high[1:])
        above = [f"{_digit(high[0], high[0])} {tail}" for tail in tails]
        last -= 1
    middle = [f"{_digit(str(first), str(last))} {_any(rest)}".strip()] if first <= last else []
    return below + middle + above


def _digit(low: str, high: str) -> str:
    return f'"{low}"' if low == high else f"[{low}-{high}]"


def _any(n: int) -> str:
    return "" if n == 0 else "[0-9]" if n == 1 else f"[0-9]{{{n}}}"
