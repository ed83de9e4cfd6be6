"""What a trained model is worth: bits per byte, plots, chats to read."""

from __future__ import annotations
