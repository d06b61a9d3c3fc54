"""Shared memory of the processes of a host: files that they map, a group's segment, and reads of other processes.

``mapping`` has the files and the futex, ``slots`` the steps and slots of a group, ``segment`` adds the arrays that its
ranks expose to each other, and ``process_vm`` reads the memory of another process.
"""
