"""Byte streams between two ranks; independent of the collectives.

============  =================================================  =========================
module        medium                                             between
============  =================================================  =========================
``tcp``       a socket                                           any two processes
``shm_ring``  two rings in shared memory, a socket as doorbell   processes of one host
============  =================================================  =========================

Both implement ``base.Connection``.
"""
