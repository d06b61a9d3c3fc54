"""torch process group whose calls run over the mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch._C._distributed_c10d import Backend as C10dBackend

from rankmesh._session.process_group import ProcessGroup as MeshGroup
from rankmesh._session.process_group import describe
from rankmesh._session.session import Session, communicator_of
from rankmesh.torch._device_backend import backend_names, new_device_backend
from rankmesh.torch._hooks import HookedCollectives, Hooks

BackendOptions = C10dBackend.Options


class ProcessGroup(HookedCollectives, c10d.ProcessGroup):
    """One rank's side of a torch process group over the mesh. torch creates it: ``backend="rankmesh"``.

    Args:
        rank: of this process.
        size: number of ranks.
        store: torch's store of the group.
        name: the group's name in torch.

    Attributes:
        session: of this process in the job.
        mesh: the SDK's group that runs the calls; ``rankmesh``'s functions take it as ``group``.
        comm: the communicator of ``mesh``.
        backend_name: name of the backend in torch.
    """

    backend_name = "rankmesh"

    def __init__(self, rank: int, size: int, store: c10d.Store, name: str) -> None:
        super().__init__(rank, size)
        self._store = store
        self._name = name
        self._description = "undefined"
        self._leave: Callable[[], None] | None = None
        self._device_backends: dict[str, Any] = {}
        self.hooks = Hooks()

    def use(self, session: Session, mesh: MeshGroup, leave: Callable[[], None]) -> ProcessGroup:
        """Have a group of the SDK run the calls; ``leave`` ends it at this rank."""
        self.session, self.mesh, self.comm, self._leave = session, mesh, communicator_of(mesh), leave
        self.comm.state.on_failure = self.hooks.on_failure
        return self

    # Identity

    def name(self) -> str:
        """Return the backend's name: ``rankmesh``, or ``gloo`` after replace_gloo."""
        return self.backend_name

    def getBackendName(self) -> str:  # noqa: N802
        """Return ``rankmesh``, always: torch's C++ reads it, and would use a group called gloo as its own of that name.

        The logger of DistributedDataParallel asks such a group for the number of gloo's threads.
        """
        return "rankmesh"

    def getGroupName(self) -> str:  # noqa: N802
        """Return the group's name in torch."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the group's name in torch."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the description of the group."""
        self._description = description

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def get_group_store(self) -> Any:
        """Return the group's store."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *(torch.device(kind) for kind in self._device_backends)]

    def __repr__(self) -> str:
        return f"<rankmesh.torch.ProcessGroup {describe(self.comm, self._name)}>"

    @property
    def gateway(self) -> str | None:
        """URL of the job's gateway, for curl and ``rankmesh status``; None until it is known."""
        return self.session.rendezvous.find()

    # Interface of a device's backend, which for the CPU is the group itself

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    supports_abort_hooks = True

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return False: the group has no allocator for tensors."""
        return False

    @property
    def options(self) -> Any:
        """Options of the backend, as those of torch's backends: name, timeout and global ranks; a copy."""
        options = BackendOptions(self.backend_name, self._timeout)
        options.global_ranks_in_group = list(self.comm.global_ranks)
        options.group_name = self._name
        return options

    def _get_backend(self, device: Any) -> Any:
        kind = torch.device(device)
        return self if self.carries(kind) else self._device_backend(kind)._get_backend(kind)

    def carries(self, device: Any) -> bool:
        """Return whether the group itself runs calls on a device's tensors; None stands for the CPU."""
        kind = "cpu" if device is None else torch.device(device).type
        return kind == "cpu" or (kind == "cuda" and self._carries_cuda)

    @functools.cached_property
    def _carries_cuda(self) -> bool:
        return backend_names(self).get("cuda") == "rankmesh"

    def _device_backend(self, device: torch.device) -> Any:
        """Return torch's backend for tensors of another device, as named in ``"cpu:rankmesh,cuda:nccl"``."""
        if device.type not in self._device_backends:
            self._device_backends[device.type] = new_device_backend(self, self._store, device.type, self._timeout)
        return self._device_backends[device.type]

    def _unsupported(self, *_: Any, **__: Any) -> Any:
        """Raise an error."""
        raise RuntimeError("backend 'rankmesh' has no windows, and no reconfigure without enable_reconfigure=True")

    get_reconfigure_handle = reconfigure = new_window = _unsupported

    # Lifetime

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.comm.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of later calls."""
        self.mesh.set_timeout(timeout)
        for backend in self._device_backends.values():
            backend.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Abort the group at all ranks; active calls fail."""
        self.mesh.abort()
        for backend in self._device_backends.values():
            backend.abort()

    def shutdown(self) -> None:
        """Leave the group; active calls fail at this rank. Does nothing the second time."""
        leave, self._leave = self._leave, None
        if leave is None:
            return
        try:
            for backend in self._device_backends.values():
                backend.shutdown()
        finally:
            leave()

    def _get_sequence_number_for_group(self) -> int:
        return self.comm.info().seq

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the group's sequence number is the same at all ranks from the start."""
