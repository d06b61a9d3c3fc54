"""What moves the data of a group's calls."""
