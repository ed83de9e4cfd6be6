"""What the shared tier costs at scale: its requests counted on recorded sessions, and what follows for fleets."""
