"""The key-value store of a job."""
