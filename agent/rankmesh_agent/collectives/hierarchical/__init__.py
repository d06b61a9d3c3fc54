"""Collectives for several ranks on several hosts: shared memory inside a host, messages between hosts.

Between hosts, every byte crosses once a host, not once a rank. There are algorithms for the collectives where that
makes a difference: those that reduce, and those that copy the same to many. gather, scatter and all_to_all move
different bytes for every rank, so they go straight over the Link, as short arrays do.
"""
