"""RankMesh under gloo's name, for programs and libraries that know torch's own backends alone."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch.distributed import distributed_c10d as module

_NAME = "gloo"
_HELPER = "_new_process_group_helper"


def replace_gloo() -> None:
    """Make torch's backend ``gloo`` RankMesh, for the groups of this process that are created from now on.

    ``torch.distributed.init_process_group("gloo")`` and ``new_group`` then create groups over the mesh, which have
    gloo's name everywhere: ``get_backend()``, ``name()``, ``"cpu:gloo,cuda:nccl"``. Only tensors in host memory use the
    mesh: those of another device use the backend named for it, which may be gloo itself. Rank 0 reports it on standard
    error. ``RANKMESH_AS=gloo`` or ``rankmesh run --as-gloo`` has the same effect without a change of the program.

    All ranks of a job must do so. Does nothing the second time.

    torch has no public way to replace one of its backends: this wraps the function that creates every group.
    """
    original = getattr(module, _HELPER)
    if not hasattr(original, "replaces_gloo"):
        replaced = functools.wraps(original)(functools.partial(_new_group, original))
        replaced.replaces_gloo = True  # type: ignore[attr-defined]
        setattr(module, _HELPER, replaced)


def _new_group(
    original: Any,
    size: int,
    rank: int,
    ranks: list[int],
    backend: str,
    store: Any,
    name: str,
    /,
    *more: Any,
    **options: Any,
) -> Any:
    """Create a group as torch does, over the mesh if its backend for host memory is gloo."""
    from rankmesh.torch._group import ProcessGroup  # not with torch: most of the SDK

    named = module.Backend(backend)
    config = module.BackendConfig(named)
    backends = dict(config.get_device_backend_map())
    if backends.get("cpu") != _NAME:
        return original(size, rank, ranks, backend, store, name, *more, **options)
    if len(set(backends.values())) == 1:
        options["backend_options"] = None  # of which gloo takes none, either
    over_mesh = ",".join(f"{device}:{other}" for device, other in {**backends, "cpu": "rankmesh"}.items())
    group, prefix_store = original(size, rank, ranks, over_mesh, store, name, *more, **options)
    if isinstance(group, ProcessGroup):
        group.backend_name = _NAME
        module._world.pg_map[group] = (named, prefix_store)
        module._world.pg_backend_config[group] = str(config)
        if not ranks and rank == 0:
            print('[rankmesh] torch\'s backend "gloo" is RankMesh in this job', file=sys.stderr, flush=True)
    return group, prefix_store
