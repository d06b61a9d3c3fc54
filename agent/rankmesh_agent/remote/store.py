"""Store of an attached process's job, by way of its agent, the only one that the process need be able to reach."""

from __future__ import annotations

from typing import TypeVar

from rankmesh_agent.remote.client import AgentClient
from rankmesh_agent.remote.requests import StoreCommand
from rankmesh_agent.store import codec
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.store import Store, response_seconds
from rankmesh_agent.wire.errors import DistNetworkError, RankFailedError

T = TypeVar("T")


class SessionStore(Store):
    """Has the agent execute commands, those of several threads at the same time."""

    def __init__(self, client: AgentClient) -> None:
        self._client = client

    def execute(self, command: Command[T], timeout: float | None = None) -> T:
        if timeout is None:
            timeout = response_seconds(command)
        request = bytes(codec.encode_command(command, 1, timeout=timeout))
        try:
            result = self._client.ask(StoreCommand(request), command.seconds + timeout)
        except RankFailedError as error:
            raise DistNetworkError(error.message, address=error.address) from error
        return codec.decode_result(command, result)
