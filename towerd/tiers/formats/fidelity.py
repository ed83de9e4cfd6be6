"""Fidelity: the formats in which the rows of each level may be stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from towerd.errors import ConfigError
from towerd.kernels.formats import BY_NAME, STORED_FORMATS
from towerd.slots.layout import NATIVE

Fidelity: TypeAlias = Literal["exact", "near", "small"]

FIDELITIES: tuple[Fidelity, ...] = ("exact", "near", "small")
LEVEL_MAX = 64
DYNAMIC = LEVEL_MAX + 1
"""The level of a segment that no base covers: deeper than every base."""


@dataclass(frozen=True, slots=True)
class LevelFormats:
    """The stored format of each level, level 0 first; deeper levels take the last entry.

    Each name is `native`, a stored format of `towerd.kernels.formats` or a transform coding. Raises ConfigError for
    other names, no level, or more than LEVEL_MAX + 1."""

    names: tuple[str, ...]
    reaches: tuple[float, ...] = ()
    """How far into a prompt that ends at a position a level's format was measured, as shares of it,
    ascending: behind that, its rows take the format of the first deeper level that reaches so far.
    Empty: all of it."""

    def __post_init__(self) -> None:
        from towerd.store.segments.coded_format import (
            is_coded,
        )  # with numpy, which --help does without

        if not 0 < len(self.names) <= LEVEL_MAX + 1:
            raise ConfigError(f"level formats need 1 to {LEVEL_MAX + 1} levels.")
        for name in self.names:
            if not is_coded(name):
                check_format(name, "level formats")

    @classmethod
    def parse(cls, text: str, place: str = "level_formats") -> LevelFormats:
        """The table of a text such as "0=q4h,1=q6h,2=q8"; `place` names it in the ConfigError."""
        found: dict[int, str] = {}
        for item in text.split(","):
            level, equals, name = (part.strip() for part in item.partition("="))
            if not equals or not level.isascii() or not level.isdigit():
                raise ConfigError(
                    f"{place} must be like 0=q4h,1=q6h,2=q8 (level=format); "
                    f"{item.strip()!r} is not."
                )
            if int(level) > LEVEL_MAX:
                raise ConfigError(f"{place}: level {level} is beyond {LEVEL_MAX}.")
            if int(level) in found:
                raise ConfigError(f"{place} names level {int(level)} twice.")
            check_format(name, place)
            found[int(level)] = name
        missing = next(level for level in range(len(found) + 1) if level not in found)
        if missing < len(found):
            raise ConfigError(
                f"{place} skips level {missing}: name every level from 0 to the deepest; "
                "deeper ones take the last format."
            )
        return cls(tuple(found[level] for level in range(len(found))))

    def to_json(self) -> dict[str, Any]:
        """{"0": name, ...}"""
        return {str(level): name for level, name in enumerate(self.names)}

    def __str__(self) -> str:
        """As `parse` reads it."""
        return ",".join(f"{level}={name}" for level, name in enumerate(self.names))

    def format_for(self, level: int) -> str:
        """The name of the format of `level` (0 or more; DYNAMIC for what no base covers)."""
        return self.names[min(level, len(self.names) - 1)]

    def stretches(self, level: int, p0: int, p1: int) -> list[tuple[int, int, str]]:
        """(start, stop, format) of the positions [p0, p1) of `level`, which prompts share up to `p1`."""
        level = min(level, len(self.names) - 1)
        ends = [min(p1, int(reach * p1)) for reach in self.reaches[level:-1]]
        found, at = [], p0
        for name, end in zip(self.names[level:], [*ends, p1], strict=False):
            if at < end:
                found.append((at, end, name))
                at = end
        return found

    @property
    def is_native(self) -> bool:
        """True when every level stays native."""
        return all(name == NATIVE for name in self.names)


def check_format(name: str, place: str) -> None:
    """ConfigError, which begins with `place`, unless `name` is `native` or a stored format."""
    known = BY_NAME.get(name)
    if name != NATIVE and (known is None or known.is_cache_type):
        names = ", ".join(row.name for row in STORED_FORMATS)
        raise ConfigError(
            f"{place}: {name!r} is not a stored format; use native or one of {names}."
        )
