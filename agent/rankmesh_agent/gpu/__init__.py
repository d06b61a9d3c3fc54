"""A group's calls on arrays on GPUs: how its ranks agree on an engine, how calls are launched, waited for and ended."""
