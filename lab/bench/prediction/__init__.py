"""What predicts stored rows: rows before and below them, and tokens alone."""
