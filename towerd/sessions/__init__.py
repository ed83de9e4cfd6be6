"""Conversations: the one recorder of turns, workflows, and what is made ready for the next request."""
