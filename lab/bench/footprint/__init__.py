"""What conversations take on disk."""
