"""Connectors: this store below other inference engines."""
