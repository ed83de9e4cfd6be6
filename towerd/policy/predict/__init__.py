"""Predictors of reuse. They learn from the policy's own events."""
