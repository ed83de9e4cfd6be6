"""The operating system: RAM and cores, default folders, thread priorities."""

from __future__ import annotations
