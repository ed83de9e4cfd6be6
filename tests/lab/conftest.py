"""towerctl as a person calls it, and a real daemon to call."""

from towerctl_runs import ctl, ctl_json, no_settings, server

__all__ = ["no_settings", "ctl", "ctl_json", "server"]
