"""Traces of requests: readers, a simulated cache with the daemon's policies, Belady's bound."""
