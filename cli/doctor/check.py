"""A check of the doctor and its finding. A check that fails in any way becomes a finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from towerd.errors import TowerdError
from towerd.settings.config import Config

Status: TypeAlias = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, and for WARN and FAIL what to do about it."""

    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One named check. `look` may raise anything; that is a FAIL."""

    group: str
    name: str
    look: Callable[[Config], Finding]

    def run(self, config: Config) -> Finding:
        """The finding; never raises."""
        try:
            return self.look(config)
        except TowerdError as error:
            return Finding("FAIL", error.message, "Do what the message says.")
        except Exception as error:
            advice = "Run make setup again; if it stays, report it with this line."
            return Finding("FAIL", f"{type(error).__name__}: {error}", advice)


def ok(found: str) -> Finding:
    """A finding that needs no action."""
    return Finding("OK", found)


def warn(found: str, advice: str) -> Finding:
    """A finding that makes towerd work less well than it could."""
    return Finding("WARN", found, advice)


def fail(found: str, advice: str) -> Finding:
    """A finding that keeps towerd from working."""
    return Finding("FAIL", found, advice)
