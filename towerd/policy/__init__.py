"""Eviction policies. Pure and synchronous, one per file."""

from towerd.policy.base import Key, Policy, Tree
from towerd.policy.factory import NAMES, make_policy

__all__ = ["NAMES", "Key", "Policy", "Tree", "make_policy"]
