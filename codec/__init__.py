"""Token ids to bits and back: the arithmetic coder that turns the text of an idle conversation
into a few kilobytes (README.md states the contract). This package holds no code yet; nothing in
the daemon depends on it.
"""

from __future__ import annotations
