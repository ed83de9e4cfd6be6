"""The shared tier: a chat of another machine, and what a bucket takes."""
