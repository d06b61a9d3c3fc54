"""torch.distributed as a mesh of services, for NumPy arrays, CuPy arrays and torch tensors.

A first program, ``train.py``::

    import numpy as np
    import rankmesh as dist

    dist.init_process_group()
    gradient = np.full(1000, dist.get_rank(), np.float32)
    dist.all_reduce(gradient)  # in place; the sum over all ranks
    print(dist.get_rank(), gradient[0])
    dist.destroy_process_group()

Run it with four ranks::

    $ rankmesh run --nproc-per-node 4 train.py

Three ways to use it, which one job may mix:

* Embedded: ``init_process_group()`` starts the rank's agent in this process.
* Attached: ``init_process_group(init_method="http://gateway:8700")`` attaches to an agent that runs as a service
  (``rankmesh agent``).
* HTTP: a program without this package takes a rank's part with requests to an agent, for example by curl.

Functions, with the names, arguments and meaning of torch.distributed (https://pytorch.org/docs/2.1/distributed.html,
and torch 2.14 for later ones; docs/compatibility.md has the differences):

* Start and end: init_process_group, destroy_process_group, is_initialized, run
* Ranks and groups: get_rank, get_world_size, new_group, new_subgroups, split_group
* Failures and growth: on_failure, shrink_group, grow_group
* Collectives: all_reduce, reduce, broadcast, all_gather, gather, scatter, reduce_scatter, all_to_all, barrier,
  monitored_barrier; with ``async_op=True`` they return a Work
* Batches of collectives: batch, all_reduce_coalesced, all_gather_coalesced
* Point-to-point: send, recv, isend, irecv, batch_isend_irecv
* Python objects: broadcast_object_list, all_gather_object, gather_object, scatter_object_list, all_to_all_object,
  send_object_list, recv_object_list
* Key-value stores: TCPStore, FileStore, HashStore, PrefixStore, get_default_store
* Arrays in shared memory: empty
* Debugging: breakpoint, mark_step, straggler_report, set_debug_level, get_debug_level

All errors derive from DistError. A RankFailedError, CollectiveTimeoutError or CollectiveMismatchError names the ranks
that failed, are missing, or made another call. rankmesh.errors has all of them.

Submodules: rankmesh.functional (collectives that return their result, for immutable arrays), rankmesh.torch (backend of
torch.distributed), rankmesh.nn (GradientBucketer, DistributedDataParallel), rankmesh.utils.data (DistributedSampler),
rankmesh.multiprocessing (spawn).
"""

# The names are in rankmesh._face, imported when the first of them is used: with NumPy and the agent that takes longer
# than all the rest of the command ``rankmesh``, most of which, like a shell's completion, needs none of it.

from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from rankmesh import errors as errors
    from rankmesh import functional as functional
    from rankmesh._face import *  # noqa: F403
    from rankmesh._face import __version__ as __version__
else:

    def __getattr__(name: str) -> object:
        from importlib import import_module

        face = vars(import_module("rankmesh._face"))
        offered = {each: value for each, value in face.items() if each == "__version__" or not each.startswith("__")}
        public = [each for each in offered if each == "__version__" or not each.startswith("_")]
        globals().update(offered, __all__=public)
        if name in globals():  # rankmesh.errors, too
            return globals()[name]
        if name.endswith("Error") and hasattr(errors := import_module("rankmesh.errors"), name):
            import warnings

            moved = f"rankmesh.{name} is rankmesh.errors.{name} from the next version on"
            warnings.warn(moved, DeprecationWarning, stacklevel=2)
            return getattr(errors, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        __getattr__("__all__")
        return sorted(globals())
