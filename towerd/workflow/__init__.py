"""Workflows: requests of several agents that belong together, named by clients or recognised."""

from towerd.workflow.tracker import Step, Tracker, Workflow

__all__ = ["Step", "Tracker", "Workflow"]
