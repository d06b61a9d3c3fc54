"""A group of two in memory of this process, as the compiled core sees it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from rankmesh_agent import native
from rankmesh_agent.group.call_queue import Plan
from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.native_calls import NativeCalls
from rankmesh_agent.group.options import Options
from rankmesh_agent.shared_memory.mapping import Mapping
from rankmesh_agent.shared_memory.segment import Segment
from rankmesh_agent.wire.ops import Call, OpType

SLOT_BYTES = 1 << 17
GUARD = 1 << 12
"""Bytes behind the group's memory, which nothing may overwrite."""
PLAIN = Options(30.0)


class State(object if native.core is None else native.core.State):  # type: ignore[misc]
    """A group's state, as far as the core looks at it."""

    global_ranks = 0, 1

    def __init__(self) -> None:
        self.seq, self.nbytes = 6, 0
        self.call: Call | None = None
        self.failure: Exception | None = None
        self.started_at: float | None = None
        self.recorder = FlightRecorder()


class Group:
    """Rank 0 of two in their memory, and its queue; rank 1 has made all calls ahead."""

    def __init__(self) -> None:
        mapping = Mapping.anonymous(Segment.bytes_for(2, SLOT_BYTES) + GUARD)
        mapping.bytes[-GUARD:] = 0xA5
        self.segment = Segment(mapping, 0, 2, SLOT_BYTES, False)
        self.words = mapping.bytes.data[:128].cast("Q")  # the two lines
        self.memory = mapping.bytes
        self.state = State()
        self.worker: threading.Thread | None = None
        self.queued: deque[Any] = deque()
        self.turn = threading.Lock()
        self.plans: dict[Any, Any] = {}
        self.left: list[Any] = []
        self.handed_over: list[Plan] = []
        assert native.core is not None
        shared = self.plans, self.queued, self.turn
        self.calls = NativeCalls(native.core, self, self.state, self.segment, shared)  # type: ignore[arg-type]

    def submit(self, key: Any, arguments: Any, options: Options, *, launches: bool) -> None:
        self.left.append(key)

    def execute(self, plan: Plan, arguments: Any, options: Options, seq: int, started: float) -> None:
        """Take a call that the core has begun; go on if rank 1 has come, with the same call."""
        self.handed_over.append(plan)
        same = self.words[9 + (seq & 1)] == plan.call.fingerprint
        if self.words[8] >= self.words[0] and same and plan.call.kind is not OpType.ALL_TO_ALL:
            plan.algorithm(self.segment, *arguments)

    def plan(self, key: tuple[Any, ...], algorithm: Callable[..., None]) -> bool:
        """Plan a call of both ranks; return whether the core knows it."""
        call = Call(*key)
        plan = self.calls.plan_of(call, algorithm)
        self.plans[key] = Plan(call, algorithm, None, 0, None, plan)  # type: ignore[arg-type]
        self.words[8] = 1 << 40
        self.words[9] = self.words[10] = call.fingerprint
        return plan is not None

    def carries_out(self, key: tuple[Any, ...], arguments: tuple[Any, ...], options: Options = PLAIN) -> bool:
        before = self.memory.tobytes(), self.segment._steps, self.segment._turn, self.state.seq
        self.calls.submit(key, arguments, options)
        after = self.memory.tobytes(), self.segment._steps, self.segment._turn, self.state.seq
        if self.left:
            assert self.left == [key]
            assert after == before
            return False
        assert after[1:] == (before[1] + 1, before[2] ^ (key[0] is not OpType.BARRIER), before[3] + 1)
        assert not self.turn.locked()
        assert self.state.started_at is None
        return True
