"""In place of a connection that has not been made yet: frames to the peer stay in the queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rankmesh_agent.transports.base import Buffer, Connection


class Unconnected(Connection):
    """A connection through which nothing goes yet."""

    medium: ClassVar[str] = ""
    peer = "a rank that is not connected yet"

    def send(self, buffers: Sequence[Buffer]) -> int:
        return 0

    def recv_into(self, buffer: memoryview) -> int:
        return 0

    def fileno(self) -> int:
        return -1

    def events(self, writing: bool) -> int:
        return 0

    def has_work(self, writing: bool, reading: bool = True) -> bool:
        return False

    def prepare_wait(self, writing: bool, reading: bool = True) -> bool:
        return True

    def on_wakeup(self) -> bool:
        return True

    def close(self) -> None:
        pass
