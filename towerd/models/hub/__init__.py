"""Models in repositories of the Hugging Face Hub: which files of one to take, and fetching them."""

from __future__ import annotations
