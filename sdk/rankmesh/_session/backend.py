"""Backends: their names, the strings that select them per device, and registered ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.wire.errors import DistBackendError

_MESH = ("mesh", "gloo", "tcp")
"""Names of the CPU data plane: scripts written for gloo, or for torch's former 'tcp', run unchanged."""
_ABSENT = {
    "ucc": "'gloo' for arrays in host memory, 'mpi' where the cluster's MPI runs over UCC, 'nccl' for arrays on GPUs",
    "xccl": "'gloo', which takes arrays in host memory: there is no engine for Intel's GPUs",
}
"""Backends of torch that are not available here, and their replacements."""


class Engines(NamedTuple):
    """The backends of a group.

    Attributes:
        host: for arrays in host memory: ``mesh``, ``mpi`` or a registered name.
        device: for arrays on GPUs: ``nccl``; ``host``, through host memory; ``auto``, which is ``nccl`` if available
            and else ``host``.
    """

    host: str = "mesh"
    device: str = "auto"
    name: str = "mesh"


class BackendOptions(NamedTuple):
    """Argument of a creator registered with ``extended_api=True``.

    Attributes:
        store: a store of the group's own.
        group_rank: this process's rank in the group.
        group_size: ranks in the group.
        timeout: default limit for an operation.
        group_id: the group's name.
        global_ranks_in_group: the members, by group rank.
    """

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]


class Backend:
    """Names of backends, which are strings: ``Backend.GLOO == "gloo"``, ``Backend("GLOO") == "gloo"``, as in torch."""

    UNDEFINED: ClassVar[str] = "undefined"
    MESH: ClassVar[str] = "mesh"
    GLOO: ClassVar[str] = "gloo"
    NCCL: ClassVar[str] = "nccl"
    UCC: ClassVar[str] = "ucc"
    MPI: ClassVar[str] = "mpi"
    XCCL: ClassVar[str] = "xccl"
    backend_list: ClassVar[list[str]] = ["undefined", "mesh", "gloo", "nccl", "xccl", "ucc", "mpi"]
    _creators: ClassVar[dict[str, Callable[[BackendOptions, Any], Any]]] = {}

    def __new__(cls, name: str) -> str:  # type: ignore[misc]
        """Return the name in lower case.

        Raises:
            ValueError: it is not a string.
        """
        return _lower(name)

    @classmethod
    def register_backend(
        cls, name: str, func: Callable[..., Any], extended_api: bool = False, devices: str | Sequence[str] | None = None
    ) -> None:
        """Register a backend under a name, for ``init_process_group`` and ``new_group``.

        Args:
            name: the name; it becomes ``Backend.NAME``.
            func: called as ``func(store, rank, size, timeout)`` for each group made with the backend; returns the
                engine, an object with a method for each collective it carries out:
                ``all_reduce(array, op)``, ``reduce(array, op, root)``, ``broadcast(array, root)``,
                ``all_gather(outputs, array)``, ``gather(outputs, array, root)``, ``scatter(output, inputs, root)``,
                ``reduce_scatter(output, inputs, op)``, ``all_to_all(outputs, inputs)``, ``barrier()``, and optionally
                ``close()``. Arrays are one-dimensional, contiguous NumPy arrays, filled in place; roots are group
                ranks; ``outputs`` of gather and ``inputs`` of scatter are empty except at the root; with PREMUL_SUM the
                factor has been applied. The ranks have agreed on the call by then; point-to-point messages go over the
                mesh.
            extended_api: call ``func(options, pg_options)`` instead, with BackendOptions.
            devices: device types that it supports; has to include ``"cpu"``, the default.

        Raises:
            RuntimeError: there is a backend of that name.
            TypeError: ``func`` is not callable.
            ValueError: ``name`` cannot be a name in a backend string, or ``devices`` leave out ``"cpu"``.
        """
        lower = _lower(name)
        if not lower.isidentifier():
            raise ValueError(f"backend name {name!r} must be an identifier")
        if lower in cls.backend_list or lower in _MESH:
            raise RuntimeError(f"there is a backend {lower!r} already")
        if not callable(func):
            raise TypeError(f"func must be callable, got {func!r}")
        wanted = [devices] if isinstance(devices, str) else list(devices or ["cpu"])
        if "cpu" not in wanted:
            raise ValueError(f"devices={wanted}: only engines for 'cpu' can be registered")
        cls._creators[lower] = func if extended_api else lambda options, pg_options: func(*options[:4])
        cls.backend_list.append(lower)
        setattr(cls, lower.upper(), lower)


def _lower(name: str) -> str:
    if not isinstance(name, str):
        raise ValueError(f"a backend is named by a string, got {name!r}")
    return name.lower()


def resolve(backend: str | None) -> Engines:
    """Return the backends that a string selects.

    Args:
        backend: a name, or ``device:name`` pairs with commas; None for the mesh, and NCCL if available.
    """
    if backend is None:
        return Engines()
    named = _by_device(_lower(backend))
    for name in named.values():
        if name not in _known() and name not in _ABSENT:
            raise ValueError(
                f"backend {name!r} is not known: use {_listed(_known())}, or register it with "
                "Backend.register_backend()"
            )
    cpu, cuda = named.get("cpu", named.get("")), named.get("cuda", named.get(""))
    if named.get("cpu") == "nccl":
        raise ValueError(f"backend {backend!r}: nccl is for arrays on GPUs, as in 'cpu:gloo,cuda:nccl'")
    for name in named.values():
        # Scripts name NCCL beside another backend on machines without a GPU, too; only an array on a GPU needs it.
        if name != "nccl" or len(named) == 1:
            require_available(name)
    if cuda == "mpi" != cpu:
        raise ValueError(f"backend {backend!r}: arrays on GPUs can go over MPI where all do: 'cpu:mpi,cuda:mpi'")
    host = "mesh" if cpu is None or cpu == "nccl" or cpu in _MESH else cpu
    device = "auto" if cuda is None else "nccl" if cuda == "nccl" else "host"
    return Engines(host, device, "nccl" if set(named.values()) == {"nccl"} else host)


def require_available(name: str) -> None:
    """Refuse a backend that is not available here."""
    reason = _unavailable_reason(name)
    if reason:
        usable = [other for other in _known() if not _unavailable_reason(other)]
        raise DistBackendError(f"backend {name!r} is not available: {reason}; available are {_listed(usable)}")


def check_growth(engines: Engines) -> None:
    """Raise ValueError if the worlds of a backend cannot grow: an MPI library knows the ranks it was started with."""
    if engines.host == "mpi":
        raise ValueError("a world of backend 'mpi' cannot grow: the MPI library has the ranks that mpirun started")


def _by_device(backend: str) -> dict[str, str]:
    """Return the names in a backend string by device; a name alone is for all devices, and its key is ``''``."""
    parts = backend.split(",") if ":" in backend else [backend]
    pairs = [tuple(word.strip() for word in part.split(":")) for part in parts]
    found = {pair[0] if len(pair) > 1 else "": pair[-1] for pair in pairs}
    whole = 2 if ":" in backend else 1
    if len(found) < len(pairs) or any(len(pair) != whole or not all(pair) for pair in pairs):
        raise ValueError(f"backend {backend!r} cannot be read: write a name, or 'cpu:name,cuda:name'")
    return found


def _known() -> list[str]:
    """Return the names of all backends, available or not."""
    return [*_MESH, "nccl", "mpi", *Backend._creators]


def _unavailable_reason(name: str) -> str:
    """Return the reason why a backend is not available, and the remedy; '' if it is."""
    if name == "nccl":
        from rankmesh_agent.device import runtime

        return runtime.nccl_unavailable_reason()
    if name == "mpi":
        from rankmesh_agent import mpi

        return mpi.unavailable_reason()
    if name in _ABSENT:
        return f"RankMesh has no engine for it; use {_ABSENT[name]}, or register one with Backend.register_backend()"
    return "" if name in _known() else "it is not known"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def is_backend_available(backend: str) -> bool:
    """Return whether a backend is available; for ``device:name`` pairs, whether all are.

    Raises:
        ValueError: the string cannot be parsed.
    """
    return not any(map(_unavailable_reason, _by_device(_lower(backend)).values()))


def is_gloo_available() -> bool:
    """Return True: ``"gloo"`` means the mesh."""
    return True


def is_nccl_available() -> bool:
    """Return whether NCCL is available: CuPy is installed with it, and there is a GPU."""
    return is_backend_available("nccl")


def is_mpi_available() -> bool:
    """Return whether MPI is available: mpi4py is installed, and finds an MPI library."""
    return is_backend_available("mpi")


def is_ucc_available() -> bool:
    """Return False: there is no UCC backend here."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Return False: there is no XCCL backend here."""
    return is_backend_available("xccl")


def is_available() -> bool:
    """Return True: the package has no optional native part."""
    return True


def is_torchelastic_launched() -> bool:
    """Return whether torchrun started this process: TORCHELASTIC_RUN_ID is set."""
    return Settings.from_env(os.environ).elastic_run is not None


def get_default_backend_for_device(device: Any) -> str:
    """Return the backend for arrays on a device: ``"mesh"`` for the CPU, ``"nccl"`` for NVIDIA's GPUs.

    Args:
        device: a device type, ``"cpu"`` or ``"cpu:0"``, or a torch.device.

    Raises:
        ValueError: there is none for the device.
    """
    backends = {"cpu": "mesh", "cuda": "nccl"}
    found = backends.get(str(device).partition(":")[0])
    if found is None:
        raise ValueError(f"there is no backend for device {device!s}; there are some for {_listed(backends)}")
    return found
