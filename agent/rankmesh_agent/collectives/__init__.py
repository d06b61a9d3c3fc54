"""Algorithms of the collectives: one file for each collective, one function for each algorithm.

An algorithm runs over a Link (messages) or a Segment (shared memory). ``select`` chooses the algorithm by the
thresholds measured in ``thresholds``; ``reduction`` does the arithmetic. Every algorithm begins with a check that all
ranks make the same call: over a Link in its arrival or its first messages, over a Segment in the first ``step``.
``hosts`` and ``leaders`` have the algorithms for several ranks on each of several hosts, which begin as those over a
Link do.
"""
