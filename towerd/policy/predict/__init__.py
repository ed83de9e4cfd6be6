"""Predictors of reuse, which learn from the policy's own events."""
