"""What people can set: flags, variables and towerd.toml, as one frozen value."""

from __future__ import annotations
