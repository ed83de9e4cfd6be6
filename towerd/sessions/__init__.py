"""Conversations: the recorder of turns, workflows, and work done ahead of the next request."""
