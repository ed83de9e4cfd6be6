"""Commands on conversations: list, show, freeze, thaw, export, import."""

from __future__ import annotations
