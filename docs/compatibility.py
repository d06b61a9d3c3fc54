"""Generator of docs/compatibility.md, the table of torch.distributed's names in rankmesh; ``make docs`` runs it.

It checks that each name of torch.distributed, and each attribute of its classes, exists, and takes torch's arguments in
torch's order. The tables below have the differences in meaning, and the reasons for missing names. A missing name
without a reason is an error.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("compatibility.md")

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

NEW = {
    "2.14": """
gather_into_tensor gather_single get_backend_impl set_timeout ProcessGroup.gather_into_tensor ProcessGroup.gather_single
ProcessGroup.get_backend ProcessGroup.get_reconfigure_handle ProcessGroup.new_window ProcessGroup.reconfigure
ProcessGroup.register_abort_hook ProcessGroup.register_post_hook ProcessGroup.register_pre_hook
ProcessGroup.supports_reconfigure ProcessGroup.supports_window ProcessGroup.unregister_abort_hook
ProcessGroup.unregister_post_hook ProcessGroup.unregister_pre_hook Work.timeout
""",
    "2.15": """
ProcessGroup.supports_abort_hooks ProcessGroup.supports_completion_hooks ReduceOp.boxed ReduceOp.unbox
""",
}
"""Names that a version of torch has, and those before it have not."""

WINDOWS = """\
There are no windows (`put`, `signal`, `wait_signal`, `map_remote_tensor`), neither here nor in torch's backend
`rankmesh`, whose `supports_window` is False. In torch 2.14 they are no public interface: the functions that make them
begin with an underscore, `torch._C._distributed_c10d.Window` has no constructor for backends written in Python, and of
torch's own backends only one for NVIDIA's GPUs has them.
"""
"""Paragraph on one-sided messages."""

BESIDE = {
    "torch.multiprocessing.spawn": ("multiprocessing.spawn", ""),
    "torch.utils.data.distributed.DistributedSampler": ("utils.data.distributed.DistributedSampler", ""),
    "torch.nn.parallel.DistributedDataParallel": (
        "nn.parallel.DistributedDataParallel",
        "torch's own; without a torch process group, it creates one of rankmesh's world",
    ),
}
"""Names on the reference pages outside torch.distributed, with their names here and their differences."""

OURS = {
    "batch": "torch's coalescing manager, public: the collectives of the block run as one batch",
    "all_gather_v": "all_gather of arrays that may differ in size",
    "reduce_scatter_v": "reduce_scatter of arrays that may differ in size",
    "functional": "collectives that return their result: all_reduce, broadcast, all_gather_single, …",
    "empty": "an array in memory that the group's ranks share; collectives on it need no copies",
    "all_to_all_object": "all_to_all of Python objects",
    "nn.GradientBucketer": "bucketed, overlapped gradient averaging for NumPy training loops",
}
"""Names that torch does not have."""

_OBJECTS = "without a token, or with `RANKMESH_PICKLE=never` or `weights_only=True`: plain data and arrays alone"
DIFFERS = {
    "all_reduce": "every dtype; sparse and expanded tensors raise: pass `.to_dense()`, or a copy",
    "all_gather_coalesced": "returns a Batch",
    "all_reduce_coalesced": "returns a Batch",
    "Backend.register_backend": "the creator returns a Python object with one method per collective",
    "get_backend": "returns `mesh` for `gloo` and `tcp`",
    "get_global_rank": "as get_process_group_ranks",
    "get_group_rank": "as get_process_group_ranks",
    "get_process_group_ranks": "of a group without this rank: ValueError, where torch answers for the last such group",
    "get_default_backend_for_device": "returns `mesh` for the CPU",
    "init_process_group": "without `enable_reconfigure`, which torch's backend has: shrink_group, grow_group",
    "is_gloo_available": "`gloo` means the mesh",
    "monitored_barrier": "every rank that called it names the missing ones, not rank 0 alone; works on every backend",
    "new_group": "only members need to call",
    "new_subgroups": "by default one group per host",
    "split_group": "works on every transport; only members need to call",
    "shrink_group": "works on every transport; also after a rank died",
    "reduce": "leaves the other ranks' tensors unchanged; every operation",
    "ProcessGroup.bound_device_id": "None: each array is on a known GPU",
    "ProcessGroup.group_desc": "`undefined` for the default group, too",
    "ProcessGroup.group_name": "`world` for the default group",
    "ProcessGroup.name": "as get_backend",
    "ReduceOp": "an enumeration, whose values are torch's numbers; torch's own is taken, too",
    "ReduceOp.AVG": "on every dtype but bool; integers exactly, rounded towards zero",
    "ReduceOp.PREMUL_SUM": "called with its factor: `ReduceOp.PREMUL_SUM(0.5)`",
    "supports_complex": "True for PRODUCT as well",
    "launch": "`python -m rankmesh.launch`, or `rankmesh run`",
    "Work": "`await work` waits in an event loop of asyncio, too",
    "Work.block_current_stream": "arrays in host memory: waits, as `synchronize`",
    "Work.get_future": "also of point-to-point messages",
    "recv": "a size mismatch raises on both sides; of a short message it ends the group",
    "send": "a size mismatch raises on both sides; of a short message it ends the group",
    "all_gather_object": _OBJECTS,
    "broadcast_object_list": _OBJECTS,
    "gather_object": _OBJECTS,
    "recv_object_list": _OBJECTS,
    "scatter_object_list": _OBJECTS,
    "send_object_list": _OBJECTS,
}
"""Differences of a name, beyond more arguments."""

_REASONS = {
    "arguments of the methods of torch's C++ process groups": """AllreduceCoalescedOptions AllreduceOptions
        AllToAllOptions BarrierOptions BroadcastOptions GatherOptions ReduceOptions ReduceScatterOptions
        ScatterOptions""",
    "methods of torch's C++ process groups: the functions take `group=`": """ProcessGroup.all_gather_single
        ProcessGroup.all_gather_single_coalesced ProcessGroup.all_to_all_single ProcessGroup.allgather
        ProcessGroup.allgather_coalesced ProcessGroup.allgather_into_tensor_coalesced ProcessGroup.allreduce
        ProcessGroup.allreduce_coalesced ProcessGroup.alltoall ProcessGroup.alltoall_base ProcessGroup.barrier
        ProcessGroup.broadcast ProcessGroup.gather ProcessGroup.gather_into_tensor ProcessGroup.gather_single
        ProcessGroup.monitored_barrier ProcessGroup.recv
        ProcessGroup.recv_anysource ProcessGroup.reduce ProcessGroup.reduce_scatter ProcessGroup.reduce_scatter_single
        ProcessGroup.reduce_scatter_single_coalesced ProcessGroup.reduce_scatter_tensor_coalesced ProcessGroup.scatter
        ProcessGroup.send ProcessGroup.split_group""",
    "destroy_process_group(group)": "ProcessGroup.shutdown",
    "get_default_store()": "ProcessGroup.get_group_store",
    "there is no object but the group; torch's backend `rankmesh` returns its process group": """get_backend_impl
        ProcessGroup.get_backend""",
    "torch's backend `rankmesh` has it; here shrink_group() and grow_group()": """ProcessGroup.get_reconfigure_handle
        ProcessGroup.reconfigure ProcessGroup.supports_reconfigure""",
    "one-sided messages: see below": "ProcessGroup.new_window ProcessGroup.supports_window",
    "torch's backend `rankmesh` has it; here on_failure()": """ProcessGroup.register_abort_hook
        ProcessGroup.supports_abort_hooks ProcessGroup.unregister_abort_hook""",
    "torch's backend `rankmesh` has it": """ProcessGroup.register_post_hook ProcessGroup.register_pre_hook
        ProcessGroup.unregister_post_hook ProcessGroup.unregister_pre_hook""",
    "`Work.get_future()` is done when the call has completed": "ProcessGroup.supports_completion_hooks",
    "the error of a call that takes too long has its limit": "Work.timeout",
    "new_group() of ranks of one job; for another job, init_process_group()": "ProcessGroup.merge_remote_group",
    "each array names its device": """Backend.backend_capability Backend.backend_type_map
        Backend.default_device_backend_map ProcessGroup.use_pg_for_symm_mem_rendezvous""",
    "get_backend() and get_backend_config() return the same as text": """BackendConfig ProcessGroup.BackendType
        ProcessGroup.CUSTOM ProcessGroup.GLOO ProcessGroup.MPI ProcessGroup.NCCL ProcessGroup.UCC
        ProcessGroup.UNDEFINED ProcessGroup.XCCL""",
    "C++ classes of torch's, and their parts": "ProcessGroupGloo ReduceOp.RedOpType ReduceOp.op TCPStore.libuvBackend",
    "`ReduceOp.PREMUL_SUM(0.5).factor`": "ReduceOp.factor",
    "for torch's compiler, and its tests": """Backend.FAKE ProcessGroup.boxed ProcessGroup.unbox
        ReduceOp.boxed ReduceOp.unbox Work.boxed Work.unbox""",
    "parts of torch's DistributedDataParallel": "BuiltinCommHookType GradBucket Logger Reducer",
    "torch's own works over a torch process group; rows and columns: new_subgroups_by_enumeration": """DeviceMesh
        init_device_mesh""",
    "type annotations of torch's": "GroupName RankType",
    "part of torch's profiler": "record_comm",
}
NOT_HERE = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Reasons for missing names."""

RAISES = {
    "all_reduce(x, op=ReduceOp.BAND)": ("RuntimeError", "TypeError"),
    "all_reduce(x + 1j, op=ReduceOp.MAX)": ("ValueError", "TypeError"),
    "all_reduce(x.expand(3, 4))": ("", "ValueError"),
    "all_gather([], x)": ("RuntimeError", "ValueError"),
    "all_gather([x[:2]], x)": ("RuntimeError", "ValueError"),
    "all_to_all_single(x, x, [3])": ("RuntimeError", "ValueError"),
    "batch_isend_irecv([])": ("IndexError", "ValueError"),
    "batch_isend_irecv([1])": ("ValueError", "TypeError"),
    "broadcast(x, src=5)": ("RuntimeError", "ValueError"),
    "broadcast_object_list([], src=0)": ("ValueError", ""),
    "destroy_process_group(1)": ("ValueError", "TypeError"),
    "get_group_rank(group.WORLD, 5)": ("", "ValueError"),
    "get_process_group_ranks(1)": ("KeyError", "TypeError"),
    "new_group(backend='nothing')": ("AssertionError", "ValueError"),
    "split_group(split_ranks=[[5]])": ("RuntimeError", "ValueError"),
}
"""Wrong calls in a world of one whose exceptions differ: torch's over gloo, and ours."""

_IMPORTED = frozenset({"log", "timedelta", "Backend.RANKMESH"})
"""Names in torch.distributed that are imports, besides modules, or that RankMesh has registered."""
_FOR_GPUS = ("ProcessGroupNCCL", "ProcessGroupMPI", "ProcessGroupUCC", "ProcessGroupXCCL")
"""How names begin that a build for other devices lacks."""


_ABSENT = object()


def find(name: str) -> Any:
    """Return the object of a dotted name in rankmesh, _ABSENT if it does not exist."""
    found: Any = importlib.import_module("rankmesh")
    for part in name.split("."):
        if isinstance(found, enum.EnumType):
            found = next(iter(found))  # name and value are attributes of the members alone
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


def compare(name: str, theirs: Any) -> str:
    """Return whether a name that torch has is ``done``, ``differs`` or is ``not here``.

    Raises:
        SystemExit: it is neither there nor explained, or takes other arguments.
    """
    ours = find(name)
    if ours is _ABSENT:
        if name not in NOT_HERE:
            raise SystemExit(f"{name} is not in rankmesh: add it, or say in NOT_HERE why not")
        return "not here"
    wanted, given = parameters(theirs), parameters(ours)
    if wanted is not None and name == "init_process_group":
        wanted = [each for each in wanted if each != "enable_reconfigure"]
    if inspect.isfunction(theirs) and wanted is not None and given is not None and given[: len(wanted)] != wanted:
        raise SystemExit(f"{name} takes {given}, torch's takes {wanted}")
    return "differs" if name in DIFFERS else "done"


def torch_names() -> list[str]:
    """Return the names torch.distributed offers, and those of the reference pages."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    # Which modules there are depends on what was imported before.
    modules = {name for name, value in vars(dist).items() if issubclass(type(value), types.ModuleType)}
    offered = {name for name in dir(dist) if not name.startswith("_")} - modules
    offered |= set(distributed_c10d.__all__)
    offered |= {f"{name}.{part}" for name in offered if find(name) is not _ABSENT for part in parts(torch_object(name))}
    offered = {name for name in offered if not name.startswith(_FOR_GPUS)}
    return sorted((offered | set(REFERENCE.split()) | set(" ".join(NEW.values()).split())) - _IMPORTED, key=str.lower)


def parts(kind: Any) -> set[str]:
    """Return the public attributes of a class that it does not inherit."""
    if not inspect.isclass(kind):
        return set()
    inherited = {name for base in kind.__mro__[1:] for name in dir(base)}
    return {name for name in dir(kind) if not name.startswith("_")} - inherited


def torch_object(name: str) -> Any:
    """Return the object of a dotted name in torch.distributed; one without arguments if torch no longer has it."""
    found: Any = sys.modules["torch.distributed"]
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _split(names: Sequence[str]) -> tuple[str, str]:
    missing = [name for name in names if name in NOT_HERE]
    return quoted(name for name in names if name not in missing), quoted(missing)


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [tuple(heads), tuple("---" for _ in heads), *map(tuple, rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def quoted(names: Iterable[str]) -> str:
    """Return names as code, those of the reference pages bold."""
    reference = frozenset(REFERENCE.split())
    return ", ".join(f"**`{name}`**" if name in reference else f"`{name}`" for name in names)


def page() -> str:
    """Return docs/compatibility.md."""
    states = {name: compare(name, torch_object(name)) for name in torch_names()}
    by_state = {state: [name for name in states if states[name] == state] for state in ("done", "differs", "not here")}
    for name in (*(ours for ours, _ in BESIDE.values()), *OURS):
        if find(name) is _ABSENT:
            raise SystemExit(f"{name} is not there")
    reasons = {reason: [name for name in by_state["not here"] if NOT_HERE[name] == reason] for reason in _REASONS}
    count = {state: len(names) for state, names in by_state.items()}
    return "\n".join(
        [
            "# Compatibility with torch",
            "",
            "On this page you find each name of torch.distributed, and what is different in `rankmesh`. A script for",
            "torch.distributed with CPU tensors runs after its import is changed. A name takes torch's arguments in",
            "torch's order, often more behind them (`timeout=`), and other arrays in place of tensors. **Bold** names",
            "are on the pages of torch's documentation, and all there. `make docs` writes this page from torch 2.13 to",
            "2.15.",
            "",
            f"{count['done']} done, {count['differs']} differ, {count['not here']} are not here.",
            "",
            "## Done",
            "",
            *textwrap.wrap(quoted(by_state["done"]), 120, break_on_hyphens=False),
            "",
            "## With a difference",
            "",
            *table(("name", "difference"), ((quoted([name]), DIFFERS[name]) for name in by_state["differs"])),
            "",
            "## Not here",
            "",
            *table(("names", "reason, or replacement"), ((quoted(names), reason) for reason, names in reasons.items())),
            "",
            "## New in torch 2.14 and 2.15",
            "",
            *table(("torch", "done", "not here"), ((torch, *_split(names.split())) for torch, names in NEW.items())),
            "",
            WINDOWS,
            "## Exceptions that differ",
            "",
            "In a world of one, with `x = torch.ones(4)`. [Errors](errors.md) has those of a job that fails.",
            "",
            *table(
                ("call", "torch, over gloo", "here"),
                ((f"`{call}`", *(kind or "none" for kind in kinds)) for call, kinds in RAISES.items()),
            ),
            "",
            "## Beside torch.distributed",
            "",
            *table(("torch", "here", "difference"), ((f"`{a}`", f"`rankmesh.{b}`", c) for a, (b, c) in BESIDE.items())),
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
