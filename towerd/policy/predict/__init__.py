"""What will be used again, and when: models that learn from the policy's own events."""
