"""A job of two processes that are attached to standalone agents, all in this process; it can be renewed."""

from __future__ import annotations

import contextlib
import itertools
import os

import httpx

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.remote.agent import RemoteAgent
from rankmesh_agent.standalone import Standalone
from rankmesh_gateway.state.registry import Registry
from support.attached import SECONDS, TOKEN, attach, everywhere, gateway

AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
GROUPS = ([0], [0, 1])
"""Ranks of the groups that a job has besides its world."""
GROUP_SECONDS = 0.2
"""Timeout of their calls."""


class LeasedJob(contextlib.ExitStack):
    """A gateway, two agents, and a lease of each that an attached process holds.

    Args:
        groups: whether the job has GROUPS.

    Attributes:
        url: the gateway's.
        agents: the agents of ranks 0 and 1.
        name: the job's name.
        groups: names of the job's groups.
    """

    def __init__(self, *, groups: bool) -> None:
        super().__init__()
        self.groups = ["" for _ in GROUPS] if groups else []
        self.url = self.enter_context(gateway(Registry()))
        # A group that replaces one of these gets the next number, if the name ends with one.
        self._names = (f"{number}-leased-by-{os.getpid()}-only" for number in itertools.count())
        self._clients: list[RemoteAgent] = []
        self.callback(self._detach)
        self.agents = [
            Standalone(Settings(token=TOKEN), lambda: self.url, host="127.0.0.1", name=f"agent-{number}")
            for number in range(2)
        ]
        for agent in self.agents:
            agent.start()
            self.callback(agent.close)
        try:
            self.restore()
        except BaseException:
            self.close()
            raise

    def restore(self) -> None:
        """Acquire leases and create groups anew where requests have ended them."""
        agents = [standalone.leases.agent for standalone in self.agents]
        if any(agent is None or agent.group_registry.find("world") is None for agent in agents) or self._has_failed(
            "world"
        ):
            self._detach()
            self.name = next(self._names)
            self._clients = everywhere(lambda rank: attach(self.agents[rank], rank, 2, job=self.name), 2)
        for place, name in enumerate(self.groups):
            if not name or self._has_failed(name):
                self.groups[place] = next(self._names)
                body = {"job": self.name, "name": self.groups[place], "ranks": GROUPS[place], "timeout": SECONDS}
                self._post("/v1/groups", body)
                for rank in GROUPS[place]:  # only now: making the group is one of its calls
                    group = self.agents[rank].leases.current().group_registry.find(self.groups[place])
                    assert group is not None
                    group.set_timeout(GROUP_SECONDS)

    def _has_failed(self, name: str) -> bool:
        group = self.agents[0].leases.current().group_registry.find(name)
        return group is None or group.failure is not None

    def _detach(self) -> None:
        for client in self._clients:
            client.close()

    def _post(self, path: str, body: dict[str, object]) -> None:
        answer = httpx.post(self.url + path, json=body, headers=AUTHORIZED, timeout=60, trust_env=False)
        assert answer.is_success, answer.text
