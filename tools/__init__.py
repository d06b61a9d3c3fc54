"""Programs for work on the project: random faults, torch's own tests, mutants, checks on a machine with a GPU."""
