"""Commands on stored segments: the list, the tree, their rank, their pins."""

from __future__ import annotations
