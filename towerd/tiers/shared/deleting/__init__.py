"""What deletes from a bucket, and what keeps it from deleting what is in use. docs/shared.md has the protocol."""
