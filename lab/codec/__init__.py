"""Studies of the codec: what prompts cost given each other, and what leaving out text saves."""
