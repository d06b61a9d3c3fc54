"""Reports to an agent of the calls that its attached process makes itself; the responses bring the groups' failures."""

from __future__ import annotations

from rankmesh_agent.group.watchdog import Watchdog
from rankmesh_agent.remote.client import CONTROL_SECONDS, AgentClient
from rankmesh_agent.remote.codec import error_from_json
from rankmesh_agent.remote.communicator import RemoteCommunicator
from rankmesh_agent.wire.attach_frames import Request
from rankmesh_agent.wire.errors import DistError, RankFailedError
from rankmesh_agent.wire.schemas import HEARTBEAT_SECONDS


class Reporter:
    """Sends a report every HEARTBEAT_SECONDS, in a thread that the first group with calls of its own starts.

    Args:
        client: of the agent.
        groups: the groups of this process; the list may change.
    """

    def __init__(self, client: AgentClient, groups: list[RemoteCommunicator]) -> None:
        self._client = client
        self._groups = groups
        self._watchdog = Watchdog("rankmesh-report", CONTROL_SECONDS)

    def start(self) -> None:
        """Start the thread. Does nothing the second time."""
        self._watchdog.add(self._check)

    def stop(self) -> None:
        """End the thread."""
        self._watchdog.remove(self._check)

    def send(self) -> None:
        """Send a report now.

        Raises:
            DistError: the agent is gone, or refuses.
        """
        groups = list(self._groups)
        reports = [(group.id, report) for group in groups if (report := group.report()) is not None]
        # The response matters without reports, too: calls in shared memory hardly notice a failure otherwise.
        failures = dict(self._client.control(Request.REPORT, {"groups": reports}).get("failures", ()))
        for group in groups:
            if group.id in failures:
                failure = error_from_json(failures[group.id])
                if isinstance(failure, DistError):
                    group.state.fail(failure)

    def _check(self) -> float:
        try:
            self.send()
        except RankFailedError as error:
            for group in list(self._groups):
                group.state.fail(error)
        except DistError:  # the next call raises it
            pass
        return HEARTBEAT_SECONDS
