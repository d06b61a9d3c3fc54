"""The progress engine: frames and messages over the connections of one process."""
