"""One catalog for several processes: its broker in one of them, its face in the others."""
