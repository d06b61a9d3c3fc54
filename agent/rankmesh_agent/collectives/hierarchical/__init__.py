"""Collectives for several ranks on several hosts: shared memory inside a host, messages between hosts.

Every byte crosses between hosts once for each host, not once for each rank. Only collectives that gain from this have
hierarchical algorithms: the reductions, and those that copy the same data to many ranks. gather, scatter and
all_to_all move different bytes for every rank, so they use the Link directly, as short arrays do.
"""
