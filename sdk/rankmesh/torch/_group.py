"""A torch process group whose calls the mesh carries out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d

from rankmesh._session.process_group import ProcessGroup as MeshGroup
from rankmesh._session.session import Session
from rankmesh.torch._collectives import Collectives
from rankmesh.torch._device_backend import device_backend
from rankmesh_agent.wire.errors import GroupAbortedError


class ProcessGroup(Collectives, c10d.ProcessGroup):
    """One rank's side of a torch process group over the mesh. torch makes it: ``backend="rankmesh"``.

    Args:
        world: what this process joined.
        mesh: the group of it that carries the calls out.
        store: the group's store of torch's; None if it has none.
        name: the group's name in torch.
        leave: ends ``mesh`` at this rank.

    Attributes:
        world: see above.
        mesh: see above: ``rankmesh``'s functions take it as ``group``.
    """

    def __init__(
        self, world: Session, mesh: MeshGroup, store: c10d.Store | None, name: str, leave: Callable[[], None]
    ) -> None:
        super().__init__(mesh.rank(), mesh.size())
        self.world = world
        self.mesh = mesh
        self._store = store
        self._name = name
        self._description = "undefined"
        self._leave: Callable[[], None] | None = leave
        self._others: dict[str, Any] = {}

    # Who it is

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Return ``rankmesh``."""
        return "rankmesh"

    def name(self) -> str:
        """Return ``rankmesh``."""
        return "rankmesh"

    @property
    def group_name(self) -> str:
        """The group's name in torch."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return self._description

    def getGroupName(self) -> str:  # noqa: N802
        """Return the group's name in torch."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Give the group a name; torch does so once it is made."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Say what the group is for."""
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def get_group_store(self) -> Any:
        """Return the group's store."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *(torch.device(kind) for kind in self._others)]

    def __repr__(self) -> str:
        return f"<rankmesh.torch.ProcessGroup {self._name!r} rank {self.rank()} of {self.size()}>"

    @property
    def gateway(self) -> str | None:
        """The URL of the job's gateway, for curl and ``rankmesh status``; None while it is not known."""
        return self.world.rendezvous.find()

    # What torch asks of a device's backend, which for the CPU is the group itself

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return False: tensors need not be allocated in a special way."""
        return False

    def _get_backend(self, device: Any) -> Any:
        kind = torch.device(device)
        return self if kind.type == "cpu" else self._beside(kind)._get_backend(kind)

    def _beside(self, device: torch.device) -> Any:
        """Return the backend of torch's for tensors of another device, as named in ``"cpu:rankmesh,cuda:nccl"``."""
        if device.type not in self._others:
            self._others[device.type] = device_backend(self, self._store, device.type, self._timeout)
        return self._others[device.type]

    # Life

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.mesh._communicator.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may take from now on."""
        self.mesh._communicator.set_timeout(timeout)
        for other in self._others.values():
            other.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """End the group at all ranks: calls under way fail, here and elsewhere."""
        error = GroupAbortedError(f"rank {self.rank()} called abort() on the group", group=self._name)
        self.mesh._communicator.abort(error)
        for other in self._others.values():
            other.abort()

    def shutdown(self) -> None:
        """Leave the group: calls under way here fail. Does nothing the second time."""
        leave, self._leave = self._leave, None
        if leave is None:
            return
        try:
            for other in self._others.values():
                other.shutdown()
        finally:
            leave()

    def _get_sequence_number_for_group(self) -> int:
        return self.mesh._communicator.info().seq

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the group has a number since it was made, the same at all ranks."""


def rankmesh_group(group: Any) -> ProcessGroup | None:
    """Return a torch group as one of the mesh, the default one if None; None at ranks that are not members.

    Raises:
        TypeError: the group has another backend.
    """
    if group is c10d.GroupMember.NON_GROUP_MEMBER:
        return None
    found = c10d.distributed_c10d._get_default_group() if group is None else group
    if not isinstance(found, ProcessGroup):
        raise TypeError(f"group must be a torch process group of backend 'rankmesh', got one of {found.name()!r}")
    return found
