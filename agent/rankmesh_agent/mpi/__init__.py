"""Data plane over the cluster's MPI, by mpi4py; imports neither before ``library.mpi()`` is called."""

from rankmesh_agent.mpi.library import cuda_aware, unavailable_reason

__all__ = ["cuda_aware", "unavailable_reason"]
