"""The job's store as an attached process reaches it: by way of its agent, the only one that it may be able to reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rankmesh_agent.store import codec
from rankmesh_agent.store.base import RESPONSE_SECONDS
from rankmesh_agent.store.blocking import BlockingStore
from rankmesh_agent.store.command import Command
from rankmesh_agent.wire import store_frames
from rankmesh_agent.wire.attach_frames import Request
from rankmesh_agent.wire.errors import DistNetworkError, ProtocolError, RankFailedError

if TYPE_CHECKING:
    from rankmesh_agent.remote.agent import RemoteAgent

T = TypeVar("T")


class SessionStore(BlockingStore):
    """Has the agent carry out commands, those of several threads at a time.

    Args:
        agent: this process's.
    """

    def __init__(self, agent: RemoteAgent) -> None:
        self._agent = agent

    def execute(self, command: Command[T]) -> T:
        request = codec.encode_command(command, 1)
        try:
            frame = self._agent.request(Request.STORE, request, command.seconds + RESPONSE_SECONDS)
        except RankFailedError as error:
            raise DistNetworkError(error.message, address=error.address) from error
        answer = bytes(frame.document)
        if len(answer) < store_frames.HEADER_BYTES:
            raise ProtocolError("the agent answered a command to the store with too few bytes")
        kind, _, count, _, number = store_frames.decode_response(answer)
        return codec.decode_result(command, kind, number, store_frames.decode_parts(answer, count) if count else [])

    def close(self) -> None:
        """Nothing to let go of: the connections are the agent's."""
