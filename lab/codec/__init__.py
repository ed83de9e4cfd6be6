"""Studies of the codec: coding prompts given each other, and leaving out text."""
