"""Commands on model files: fetching known ones, making GGUFs."""

from __future__ import annotations
