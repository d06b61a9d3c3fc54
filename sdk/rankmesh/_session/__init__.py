"""Session: the process's membership in a job, with its agent, its process groups and their backends."""
