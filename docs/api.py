"""Generator of docs/api.md, the table of torch.distributed's names in rankmesh; ``make docs`` runs it.

It checks that a name exists, and takes torch's arguments in torch's order. The tables below have the differences in
meaning, and the reasons for missing names. A missing name without a reason is an error.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).with_name("api.md")

REFERENCE = """
all_gather all_gather_into_tensor all_gather_multigpu all_gather_object all_reduce all_reduce_multigpu all_to_all
all_to_all_single Backend Backend.register_backend Backend.GLOO Backend.NCCL Backend.MPI Backend.UCC Backend.UNDEFINED
barrier batch_isend_irecv broadcast broadcast_multigpu broadcast_object_list destroy_process_group DistBackendError
FileStore gather gather_object get_backend get_debug_level get_global_rank get_group_rank get_process_group_ranks
get_rank get_world_size group.WORLD HashStore init_process_group irecv is_available is_gloo_available is_initialized
is_mpi_available is_nccl_available is_torchelastic_launched isend launch monitored_barrier new_group P2POp PrefixStore
recv reduce reduce_multigpu reduce_op reduce_op.SUM reduce_op.PRODUCT reduce_op.MIN reduce_op.MAX ReduceOp ReduceOp.SUM
ReduceOp.AVG ReduceOp.PRODUCT ReduceOp.MIN ReduceOp.MAX ReduceOp.BAND ReduceOp.BOR ReduceOp.BXOR ReduceOp.PREMUL_SUM
_make_nccl_premul_sum reduce_scatter reduce_scatter_multigpu reduce_scatter_tensor scatter scatter_object_list send
set_debug_level set_debug_level_from_env Store Store.add Store.compare_set Store.delete_key Store.get Store.num_keys
Store.set Store.set_timeout Store.wait TCPStore Work.get_future Work.is_completed Work.wait
"""
"""Names on the reference pages: torch 2.1's, the deprecated one's and the summary's."""

BESIDE = {
    "torch.multiprocessing.spawn": ("multiprocessing.spawn", ""),
    "torch.utils.data.distributed.DistributedSampler": ("utils.data.distributed.DistributedSampler", ""),
    "torch.nn.parallel.DistributedDataParallel": (
        "nn.parallel.DistributedDataParallel",
        "torch's own; without a torch process group, it creates one of rankmesh's world",
    ),
}
"""Names on the reference pages outside torch.distributed, with their names here and their differences."""

CLASSES = {
    "Store": "append check clone has_extended_api list_keys multi_get multi_set queue_len queue_pop queue_push timeout",
    "TCPStore": "host port",
    "FileStore": "path",
    "PrefixStore": "underlying_store",
    "Work": "block_current_stream exception get_future_result is_success result source_rank synchronize",
    "ProcessGroup": "group_desc group_name name rank size",
}
"""Attributes of torch 2.13's classes that scripts may use, beyond the reference pages."""

OURS = {
    "batch": "torch's coalescing manager, public: the collectives of the block run as one batch",
    "all_gather_v": "all_gather of arrays that may differ in size",
    "reduce_scatter_v": "reduce_scatter of arrays that may differ in size",
    "empty": "an array in memory that the group's ranks share; collectives on it need no copies",
    "all_to_all_object": "all_to_all of Python objects",
    "nn.GradientBucketer": "bucketed, overlapped gradient averaging for NumPy training loops",
}
"""Names that torch does not have."""

DIFFERS = {
    "all_reduce": "every dtype; sparse and expanded tensors raise: pass `.to_dense()`, or a copy",
    "all_gather_coalesced": "returns a Batch",
    "all_reduce_coalesced": "returns a Batch",
    "Backend.register_backend": "the creator returns a Python object with one method per collective",
    "get_backend": "returns `mesh` for `gloo` and `tcp`",
    "get_default_backend_for_device": "returns `mesh` for the CPU",
    "is_gloo_available": "`gloo` means the mesh",
    "monitored_barrier": "every rank that called it names the missing ones, not rank 0 alone; works on every backend",
    "new_group": "only members need to call",
    "new_subgroups": "by default one group per host",
    "split_group": "works on every transport; only members need to call",
    "shrink_group": "works on every transport; also after a rank died",
    "reduce": "leaves the other ranks' tensors unchanged; every operation",
    "ReduceOp.AVG": "on every dtype but bool; integers exactly, rounded towards zero",
    "ReduceOp.PREMUL_SUM": "called with its factor: `ReduceOp.PREMUL_SUM(0.5)`",
    "supports_complex": "True for PRODUCT as well",
    "launch": "`python -m rankmesh.launch`, or `rankmesh run`",
    "Work": "`await work` waits in an event loop of asyncio, too",
    "Work.block_current_stream": "arrays in host memory: waits, as `synchronize`",
    "Work.get_future": "also of point-to-point messages",
    "recv": "a size mismatch raises on both sides; of a short message it ends the group",
    "send": "a size mismatch raises on both sides; of a short message it ends the group",
}
"""Differences of a name, beyond more arguments."""

_OPTIONS = "an argument of the methods of torch's C++ process groups, which the functions make unnecessary"
_DDP = "part of torch's DistributedDataParallel"
NOT_HERE = {
    "AllToAllOptions": _OPTIONS,
    "AllreduceCoalescedOptions": _OPTIONS,
    "AllreduceOptions": _OPTIONS,
    "BarrierOptions": _OPTIONS,
    "BroadcastOptions": _OPTIONS,
    "GatherOptions": _OPTIONS,
    "ReduceOptions": _OPTIONS,
    "ReduceScatterOptions": _OPTIONS,
    "ScatterOptions": _OPTIONS,
    "BackendConfig": "get_backend_config() returns the same as text",
    "ProcessGroupGloo": "a C++ class of torch's",
    "BuiltinCommHookType": _DDP,
    "GradBucket": _DDP,
    "Reducer": _DDP,
    "Logger": _DDP,
    "DeviceMesh": "torch's own works over a torch process group; rows and columns: new_subgroups_by_enumeration",
    "init_device_mesh": "see DeviceMesh",
    "GroupName": "a type annotation of torch's",
    "RankType": "a type annotation of torch's",
    "record_comm": "part of torch's profiler",
}
"""Reasons for missing names."""

_IMPORTED = frozenset({"log", "timedelta"})
"""Names in torch.distributed that are imports, besides modules."""


class Row(NamedTuple):
    """A line of the table."""

    name: str
    state: str
    remark: str


_ABSENT = object()


def find(name: str) -> Any:
    """Return the object of a dotted name in rankmesh, _ABSENT if it does not exist."""
    found: Any = importlib.import_module("rankmesh")
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(f"{found.__name__}.{part}")
            except (ImportError, AttributeError):
                return _ABSENT
    return found


def parameters(function: Any) -> list[str] | None:
    """Return the names of a function's arguments that may be given by position, None if they cannot be known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    found = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
    return [name for name in found if not name.startswith("_")]  # torch's own affairs


def compare(name: str, theirs: Any) -> Row:
    """Return the row of a name that torch has.

    Raises:
        SystemExit: it is neither there nor explained, or takes other arguments.
    """
    ours = find(name)
    if ours is _ABSENT:
        if not NOT_HERE.get(name):
            raise SystemExit(f"{name} is not in rankmesh: add it, or say in NOT_HERE why not")
        return Row(name, "not here", NOT_HERE[name])
    wanted, given = parameters(theirs), parameters(ours)
    if inspect.isfunction(theirs) and wanted is not None and given is not None and given[: len(wanted)] != wanted:
        raise SystemExit(f"{name} takes {given}, torch's takes {wanted}")
    remark = DIFFERS.get(name, "")
    return Row(name, "differs" if remark else "done", remark)


def torch_names() -> list[str]:
    """Return the names torch.distributed offers, and those of the reference pages."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    # Which modules there are depends on what was imported before.
    modules = {name for name, value in vars(dist).items() if issubclass(type(value), types.ModuleType)}
    offered = {name for name in dir(dist) if not name.startswith("_")} - modules - _IMPORTED
    offered |= set(distributed_c10d.__all__)
    offered |= {f"{kind}.{name}" for kind, names in CLASSES.items() for name in names.split()}
    return sorted(offered | set(REFERENCE.split()), key=str.lower)


def torch_object(name: str) -> Any:
    """Return the object of a dotted name in torch.distributed; one without arguments if torch no longer has it."""
    found: Any = sys.modules["torch.distributed"]
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [tuple(heads), tuple("---" for _ in heads), *map(tuple, rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def page() -> str:
    """Return docs/api.md."""
    rows = [compare(name, torch_object(name)) for name in torch_names()]
    beside = []
    for theirs, (ours, remark) in BESIDE.items():
        if find(ours) is _ABSENT:
            raise SystemExit(f"{ours} is not there")
        beside.append((f"`{theirs}`", f"`rankmesh.{ours}`", "differs" if remark else "done", remark))
    for name in OURS:
        if find(name) is _ABSENT:
            raise SystemExit(f"{name} is not there")
    count = {state: sum(row.state == state for row in rows) for state in ("done", "differs", "not here")}
    reference = frozenset(REFERENCE.split())
    return "\n".join(
        [
            "# Names of torch.distributed in rankmesh",
            "",
            "Written by `make docs` from torch 2.13 and the pages of torch 2.1; do not edit. A name that is done takes",
            "torch's arguments in torch's order, often more behind them (`timeout=`), and arrays of every container in",
            "torch's tensors' place. **Bold** names are on the pages of the documentation, all of which are there.",
            "",
            f"{count['done']} done, {count['differs']} differ, {count['not here']} are not here.",
            "",
            *table(
                ("name", "", ""),
                (
                    (f"**`{row.name}`**" if row.name in reference else f"`{row.name}`", row.state, row.remark)
                    for row in rows
                ),
            ),
            "",
            "## Beside torch.distributed",
            "",
            *table(("torch", "here", "", ""), beside),
            "",
            "## Names that torch does not have",
            "",
            *table(("name", ""), ((f"`{name}`", words) for name, words in OURS.items())),
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"wrote {PAGE}\n")
