"""Byte streams between two ranks, and shared memory among many; they know no collective.

==========  =================================================  =========================
module      what it moves bytes through                        between
==========  =================================================  =========================
``tcp``     a socket                                           any two processes
``ring``    two rings in shared memory, a socket as doorbell   processes of one host
``inproc``  two queues                                         threads of one process
``segment`` slots in shared memory, futex to wait              all ranks of a group
==========  =================================================  =========================

The first three implement ``base.Transport``; ``conversation`` is what two ends of a socket say before it is a
connection, ``shared`` has the mapping and the futex that ring and segment stand on, ``vmread`` reads another process's
memory, ``windows`` is what the ranks of a segment let each other read.
"""
