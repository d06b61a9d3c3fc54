"""Ranks whose calls are made over HTTP: an application for each rank of a World, and a client of each."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.http.middleware import SecurityMiddleware
from rankmesh_agent.wire.dtypes import FROM_NAME
from rankmesh_agent.wire.schemas import AgentHealth, AgentInfo, GroupInfo, GroupRequest, Member
from support.processes import Rank, Ranks, wait_until
from support.served_store import ServedStore
from support.threads import World

Array = np.ndarray[Any, Any]


class GroupsAgent:
    """The agent of a rank with these groups."""

    def __init__(self, rank: int, size: int, groups: Sequence[Any] = ()) -> None:
        self.rank = rank
        self.size = size
        self.communicators = list(groups)
        self.store = ServedStore()
        self.reasons: list[str] = []
        self.is_ready = True
        self.world = SimpleNamespace(timeout=30.0)
        self.making: Callable[[GroupRequest, Callable[[LocalCommunicator], None]], tuple[Any, bool]] | None = None

    def health(self) -> AgentHealth:
        status: Any = "failing" if self.reasons else "ok"
        return AgentHealth(status, "rankmesh-agent", self.rank, self.size, "0.1.0", self.reasons)

    def ready(self) -> bool:
        return self.is_ready

    def info(self) -> AgentInfo:
        member = Member(self.rank, "i", "host", "h", 7, ["127.0.0.1:9000"], "http://127.0.0.1:8000")
        return AgentInfo("job", 1, self.size, member, "http://127.0.0.1:29500", {"0": "segment"}, 1.5, "0.1.0")

    @property
    def group_registry(self) -> GroupsAgent:
        return self

    def groups(self) -> list[GroupInfo]:
        return [group.info() for group in self.communicators]

    def find(self, name: str) -> Any:
        found = [group for group in self.communicators if name in (group.name, f"{group.id:016x}")]
        return found[0] if found else None

    def make_over_http(
        self, wanted: GroupRequest, timeout: float, begun: Callable[[LocalCommunicator], None]
    ) -> tuple[Any, bool]:
        assert self.making is not None
        return self.making(wanted, begun)

    def drop_over_http(self, group: Any) -> None:
        self.communicators.remove(group)
        group.close()


def applications(world: World, **options: Any) -> list[SecurityMiddleware]:
    """Return the application of each rank's agent; ``options`` are create_app's."""
    from rankmesh_agent.http.app import create_app  # FastAPI takes longer to import than all else that tests collect

    agents: list[Any] = [GroupsAgent(rank, world.size, [world.communicators[rank]]) for rank in range(world.size)]
    return [create_app(agent, **options) for agent in agents]


@contextlib.asynccontextmanager
async def clients(apps: Sequence[SecurityMiddleware]) -> AsyncIterator[list[httpx.AsyncClient]]:
    """A client of each application."""
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for app in apps:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60)
            made.append(await stack.enter_async_context(client))
        yield made


@contextlib.contextmanager
def services(ranks: Ranks, agents: int, **variables: str) -> Iterator[list[str]]:
    """The URLs of a gateway and of standalone agents: processes, each of which ends with exit code 0."""
    started: list[Rank] = []

    def start(name: str, module: str, *arguments: str) -> str:
        process = ranks.command("-m", module, "--port", "0", *arguments, name=name, **variables)
        started.insert(0, process)
        found = wait_until(lambda: re.search(r"ready at (http://\S+?)[\s,;]", process.stdout + "\n"), name)
        return str(found[1])

    gateway = start("gateway", "rankmesh_gateway")
    names = [f"agent-{number}" for number in range(agents)]
    yield [gateway, *(start(name, "rankmesh_agent", "--gateway", gateway, "--name", name) for name in names)]
    for process in started:
        process.process.terminate()
    for process in started:
        assert process.process.wait(20) == 0, process


def npy(array: Array) -> bytes:
    """Return an array as the .npy file that NumPy makes of it."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def from_npy(body: bytes) -> Array:
    """Return what NumPy reads in a .npy file."""
    found: Array = np.load(io.BytesIO(body), allow_pickle=False)
    return found


def from_raw(answer: httpx.Response) -> Array:
    """Return the array of an answer of raw elements."""
    shape = tuple(int(length) for length in answer.headers["RankMesh-Shape"].split(",") if length)
    return np.frombuffer(answer.content, FROM_NAME[answer.headers["RankMesh-Dtype"]]).reshape(shape)
