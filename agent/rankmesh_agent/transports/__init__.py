"""Byte streams between two ranks, and the shared memory of a group; independent of the collectives.

==========  =================================================  =========================
module      medium                                             between
==========  =================================================  =========================
``tcp``     a socket                                           any two processes
``shm_ring`` two rings in shared memory, a socket as doorbell  processes of one host
``segment`` slots in shared memory, futex to wait              all ranks of a group
==========  =================================================  =========================

The first two implement ``base.Connection``. ``shared_memory`` has the mapping and the futex under ``shm_ring`` and
``segment``. ``process_vm`` reads the memory of another process. ``slots`` and ``windows`` are the two halves of
``segment``.
"""
