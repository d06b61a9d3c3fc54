"""An agent that says what a test tells it to say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.group.work import Future, Work
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.wire.credentials import Grant
from rankmesh_agent.wire.schemas import AgentHealth, AgentInfo, FlightRecord, GroupInfo, GroupRequest, InFlight, Member
from rankmesh_agent.wire.stats import AgentStats, GroupOpStats, HeartbeatStats
from support.served_store import ServedStore


class FakeGroup:
    """A group whose calls are over at once, or raise the agent's error."""

    timeout = 1.0
    failure = None

    def __init__(self, agent: FakeAgent, told: GroupInfo) -> None:
        self.agent = agent
        self.told = told
        self.id = int(told.id, 16)
        self.name = told.name
        self.ranks = self.global_ranks = tuple(told.ranks)
        self.rank = told.ranks.index(1)
        self.size = len(told.ranks)
        self.engine = SimpleNamespace(progress=lambda: None)

    def info(self) -> GroupInfo:
        return self.told

    def abort(self, error: BaseException) -> None:
        pass

    def _collective(self, *_: Any) -> Work:
        work = Work("call", [], Future())
        work.end(self.agent.error)
        return work

    def _message(self, *_: Any) -> Work:
        def complete(_: Any) -> bool:
            if self.agent.error is not None:
                raise self.agent.error
            return True

        message = SimpleNamespace(
            op="recv", deadline=Deadline(1), complete=complete, source=lambda: 3, abandon=lambda error: None
        )
        return Work("recv", [], message=message)

    all_reduce = reduce = broadcast = all_gather = gather = _collective
    scatter = reduce_scatter = all_to_all = barrier = _collective
    send = receive = _message


class FakeAgent:
    """An agent, embedded or standalone and leased."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.store: StoreClient = ServedStore()
        self.reasons: list[str] = []
        self.is_ready = True
        self.world = SimpleNamespace(timeout=30.0)
        self.error: Any = None
        self.communicators = [
            FakeGroup(self, GroupInfo("00000000000000aa", "world", [0, 1, 2, 3], 3, "shm", "barrier #2", "")),
            FakeGroup(self, GroupInfo("00000000000000bb", "pair", [1, 3], 0, "tcp", "", "rank 3 failed")),
        ]

    @property
    def agent(self) -> FakeAgent:
        return self

    @property
    def group_registry(self) -> FakeAgent:
        return self

    @property
    def recorder(self) -> FakeAgent:
        return self

    def current(self, grant: Grant | None = None) -> FakeAgent:
        if grant is not None:
            grant.require(self.settings.job)
        return self

    def health(self) -> AgentHealth:
        return AgentHealth("failing" if self.reasons else "ok", "rankmesh-agent", 1, 4, "0.1.0", self.reasons)

    def ready(self) -> bool:
        return self.is_ready

    def info(self) -> AgentInfo:
        member = Member(1, "i", "host", "h", 7, ["127.0.0.1:9000"], "http://127.0.0.1:8000")
        return AgentInfo("job", 1, 4, member, "http://127.0.0.1:29500", {"0": "segment"}, 1.5, "0.1.0")

    def groups(self) -> list[GroupInfo]:
        return [group.info() for group in self.communicators]

    def find(self, name: str) -> FakeGroup | None:
        if self.error is not None and self.error.code == "not-leased":
            raise self.error
        return next((group for group in self.communicators if name in (group.told.name, group.told.id)), None)

    def make_over_http(self, wanted: GroupRequest, timeout: float, begun: Any) -> tuple[Any, bool]:
        if self.error is not None:
            raise self.error
        return self.communicators[1], wanted.name != "pair"

    def drop_over_http(self, group: Any) -> None:
        if self.error is not None:
            raise self.error

    def in_flight(self, group: str) -> list[InFlight] | None:
        return {
            "pair": [],
            "world": [
                InFlight("barrier()", 3, 1.5, 0),
                InFlight("all_reduce(float32[2], SUM)", 4, 0.5, 8),
                InFlight("recv from any rank (tag 0)", 0, 2.5, 16),
            ],
        }.get({"00000000000000aa": "world", "00000000000000bb": "pair"}.get(group, group))

    def records(self, group: str | None, last: int | None) -> list[FlightRecord]:
        self.asked = group, last
        begin, end = 1.75e9, 1.75e9 + 1
        sent = FlightRecord(
            "00000000000000aa",
            "world",
            0,
            "send",
            "send to rank 3 (tag 7)",
            "float32",
            2,
            8,
            begin,
            end,
            "failed",
            "Oh",
        )
        barrier = FlightRecord(
            "00000000000000aa", "world", 3, "barrier", "barrier()", "", 0, 0, begin, None, "in-flight", ""
        )
        return [sent, barrier]

    def stats(self) -> AgentStats:
        return AgentStats(
            [
                GroupOpStats(4096, 1.25, 1, [0, 2, 1] + [0] * 13, "world", "all_reduce", 2, 0.5),
                GroupOpStats(8, 0.5, 0, [0] * 15 + [1], 'odd "name"\\n', "send"),
            ],
            HeartbeatStats(7, 1, 0.25),
            {"segment": 2, "tcp": 1},
            1,
        )
