"""Reports to an agent of the calls that its attached process makes itself; the responses bring the groups' failures."""

from __future__ import annotations

from collections.abc import Callable

from rankmesh_agent.group.watchdog import Watchdog
from rankmesh_agent.remote.client import CONTROL_SECONDS, AgentClient
from rankmesh_agent.remote.codec import error_from_json
from rankmesh_agent.remote.communicator import RemoteCommunicator
from rankmesh_agent.wire.attach_frames import Request
from rankmesh_agent.wire.errors import DistBackendError, DistError, RankFailedError
from rankmesh_agent.wire.schemas import HEARTBEAT_SECONDS

WATCH_SECONDS = 0.2
"""Interval of the reports of a process that has callbacks for failures."""


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
        self._notify: Callable[[DistBackendError], None] | None = None

    def start(self) -> None:
        """Start the thread. Does nothing the second time."""
        self._watchdog.add(self._check)

    def watch(self, notify: Callable[[DistBackendError], None]) -> None:
        """Have a function called with the error of each rank of the world that fails, WATCH_SECONDS later at most."""
        self._notify = notify
        self.start()
        self._watchdog.wake()

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
        notify = self._notify
        document = {"groups": reports, "watches": notify is not None}
        response = self._client.control(Request.REPORT, document)
        failures = dict(response.get("failures", ()))
        for group in groups:
            if group.id in failures:
                failure = error_from_json(failures[group.id])
                if isinstance(failure, DistError):
                    group.state.fail(failure)
        for each in response.get("lost", ()):
            failure = error_from_json(each)
            if notify is not None and isinstance(failure, DistBackendError):
                notify(failure)

    def _check(self) -> float:
        try:
            self.send()
        except RankFailedError as error:
            for group in list(self._groups):
                group.state.fail(error)
        except DistError:  # the next call raises it
            pass
        return HEARTBEAT_SECONDS if self._notify is None else WATCH_SECONDS
