"""What an engine for arrays on GPUs does: enqueue a call on a stream."""

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

if TYPE_CHECKING:
    from rankmesh_agent.gpu.launch import Launch


class GpuBackend(Backend):
    """Carries out the calls of one group on arrays on GPUs.

    An algorithm is called with the Launch and the call's own arguments, its device being the current one, and returns
    when all is enqueued on the launch's stream.
    """

    device: ClassVar[str] = "cuda"

    may_block: ClassVar[bool] = False
    """Whether enqueuing may wait for other ranks where nothing but ``abort`` ends the wait."""

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], watch: CallContext) -> None:
        """Enqueue a call.

        Args:
            algorithm: see above.
            arguments: the Launch, the context in which it is looked after, and the call's own.
            watch: see Backend.
        """
        launch, attended, *own = arguments
        with runtime.on_device(launch.device), attended, runtime.cuda_errors(launch.description):
            self.enqueue(algorithm, launch, own, watch)

    def enqueue(self, algorithm: Algorithm, launch: Launch, own: Sequence[Any], watch: CallContext) -> None:
        """Enqueue a call, its device being the current one."""
        algorithm(launch, *own)

    def connect(self, launch: Launch, sender: int, receiver: int) -> None:
        """Make what messages from a group rank to another need, one of which is this one; waits for the other."""

    def send(self, launch: Launch, array: DeviceArray, peer: int) -> None:
        """Enqueue that an array is sent to a group rank."""
        raise DistBackendError(f"{self.name} carries no messages")

    def recv(self, launch: Launch, array: DeviceArray, peer: int) -> None:
        """Enqueue that an array is received from a group rank."""
        raise DistBackendError(f"{self.name} carries no messages")

    def grouped(self) -> AbstractContextManager[object]:
        """Have the messages of a block be enqueued together at its end, so that none of them waits for another."""
        return contextlib.nullcontext()

    @abstractmethod
    def async_error(self) -> str:
        """Return what the engine itself knows to be wrong, nothing if all is well. For any thread."""

    @abstractmethod
    def abort(self) -> None:
        """End the kernels under way; no call can be made any more. For any thread; does nothing the second time."""
