"""Data plane over the cluster's MPI, by mpi4py; imports neither before ``library.mpi()`` is called."""

from rankmesh_agent.mpi.library import unavailable_reason

__all__ = ["unavailable_reason"]
