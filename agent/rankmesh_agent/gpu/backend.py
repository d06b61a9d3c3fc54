"""Interface of the backends for arrays on GPUs, which enqueue calls on CUDA streams."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.device import runtime
from rankmesh_agent.device.array import DeviceArray
from rankmesh_agent.wire.errors import DistBackendError
from rankmesh_agent.wire.ops import Call

if TYPE_CHECKING:
    from rankmesh_agent.gpu.launch import Launch


class GpuBackend(Backend):
    """Runs one group's calls on arrays on GPUs.

    An algorithm takes the Launch and the call's own arguments. The launch's device is current, and it returns once
    all its work is enqueued on the launch's stream.
    """

    device: ClassVar[str] = "cuda"
    waits_on_host: ClassVar[bool] = True
    """True if enqueuing a call waits on the host until the other ranks have made it, within its deadline; False if only
    the library may wait for them, in a wait that only ``abort`` ends."""

    def algorithm(self, call: Call) -> Algorithm:
        """Return the method with the name of the collective."""
        algorithm: Algorithm = getattr(self, call.name)
        return algorithm

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        """Enqueue a call.

        Args:
            algorithm: see the class.
            arguments: the Launch, what watches it as a context manager, and the call's own arguments.
            context: see Backend.
        """
        launch, watched, *own = arguments
        with runtime.DeviceGuard(launch.device), watched, runtime.CudaErrors(launch.description):
            self.enqueue(algorithm, launch, own, context)

    def enqueue(self, algorithm: Algorithm, launch: Launch, own: Sequence[Any], context: CallContext) -> None:
        """Enqueue a call; its device is the current one."""
        algorithm(launch, *own)

    def connect(self, launch: Launch, sender: int, receiver: int) -> None:
        """Set up messages from one group rank to another, one of which is this rank; waits for the other."""

    def send(self, launch: Launch, array: DeviceArray, peer: int) -> None:
        """Enqueue the send of an array to a group rank."""
        raise DistBackendError(f"{self.name} does not support point-to-point messages")

    def recv(self, launch: Launch, array: DeviceArray, peer: int) -> None:
        """Enqueue the receive of an array from a group rank."""
        raise DistBackendError(f"{self.name} does not support point-to-point messages")

    def grouped(self) -> AbstractContextManager[object]:
        """Enqueue the messages of a block together at its end, so that none of them waits for another."""
        return contextlib.nullcontext()

    @abstractmethod
    def async_error(self) -> str:
        """Return the error that the backend itself has detected, '' if there is none. Thread-safe."""

    @abstractmethod
    def abort(self) -> None:
        """End the kernels in flight; the backend takes no further calls. Thread-safe and idempotent."""
