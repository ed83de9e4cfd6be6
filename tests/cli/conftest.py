"""Runs towerctl as a user does, against a real daemon."""

from towerctl_runs import ctl, ctl_json, no_settings, server

__all__ = ["no_settings", "ctl", "ctl_json", "server"]
