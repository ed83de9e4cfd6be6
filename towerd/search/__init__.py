"""Full-text search over all conversations: derived data in a database file of its own."""
