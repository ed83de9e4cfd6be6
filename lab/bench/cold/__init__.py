"""Frozen conversations."""
