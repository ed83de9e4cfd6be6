"""What training minimizes: the loss of text, and the distance from a teacher."""

from __future__ import annotations
