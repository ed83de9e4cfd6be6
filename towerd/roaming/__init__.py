"""Sessions and bases in the shared tier: put there, and taken from there."""
