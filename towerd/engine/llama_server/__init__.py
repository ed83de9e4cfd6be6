"""The llama-server engine: adds towers to a real llama-server, started or attached to.

towerd decides which conversation is in which of its slots. A tower is written as a slot file,
restored into the slot, and the request forwarded pinned to it; what a slot gained is saved, and
its delta stored, only before the slot is given to another conversation.
"""
