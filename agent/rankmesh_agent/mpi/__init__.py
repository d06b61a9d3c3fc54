"""The data plane of a cluster's own MPI, by way of mpi4py; loads neither before ``library.mpi()`` is called."""

from rankmesh_agent.mpi.library import cuda_aware, unavailable_reason

__all__ = ["cuda_aware", "unavailable_reason"]
