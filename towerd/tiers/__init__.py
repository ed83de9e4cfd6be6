"""The ladder of a segment's rows: live (engine) -> hot (RAM) -> warm (file) -> tokens only."""
