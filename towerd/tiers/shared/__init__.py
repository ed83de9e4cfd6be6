"""The tier below warm: segments, and what sessions and bases are made of, as objects in an object store."""
