"""Encryption at rest: the keys of a store, and files and databases that read as noise without them.

Nothing of it is imported unless a store is encrypted."""
