"""The web application: every route, and the life cycle of a daemon and of a store alone."""

from __future__ import annotations
