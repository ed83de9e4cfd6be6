"""Binary decisions to bits and back."""

from __future__ import annotations
