"""The llama-server engine: a real llama-server, started or attached to, given towers.

towerd decides which conversation sits in which of its slots. A tower is written as a slot file,
restored into the slot, and the request forwarded pinned to it; what a slot gained is saved and
its delta stored only before the slot is given to someone else.
"""
