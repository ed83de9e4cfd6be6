"""Eviction policies that only a replay runs, and all policies by name."""
