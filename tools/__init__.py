"""Programs for who works on the project: what is seen on a machine with a GPU."""
