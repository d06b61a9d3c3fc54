"""A group's short messages through shared memory that the compiled core carries out."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from rankmesh_agent.group.local_state import LocalGroupState
from rankmesh_agent.group.native_calls import total
from rankmesh_agent.net.spin import core_contention
from rankmesh_agent.progress.matching import MessageMatcher
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.dtypes import UNPADDED, code_of
from rankmesh_agent.wire.frames import Opcode
from rankmesh_agent.wire.stats import OpStats

_MAX_KINDS = 1024
_TAGS = range(-(1 << 63), 1 << 63)


class NativeMessages(dict[Any, Any]):
    """The synchronous messages of a group that the compiled core carries out: those of each kind.

    Args:
        core: the compiled core.
        state: of the group.
        matcher: of the progress engine.

    Attributes:
        at_once: see core.Messages.
    """

    def __init__(self, core: ModuleType, state: LocalGroupState, matcher: MessageMatcher) -> None:
        super().__init__()
        self._core = core
        self._state = state
        self._credits = matcher.credits
        self._counts = {"send": core.Counts(), "recv": core.Counts()}
        queues = matcher.receives.queues, matcher.unexpected.queues
        self.at_once = core.Messages(state, state.engine, queues, self, core_contention).at_once

    def added_to(self, stats: Mapping[str, OpStats]) -> dict[str, OpStats]:
        """Return statistics by operation, with those of the core's messages."""
        return {op: total(stats[op], counts) for op, counts in self._counts.items()}

    def __missing__(self, kind: tuple[bool, np.dtype[Any], int, int, int]) -> Any:
        """Return the core's Message of a kind of messages, None if it does not carry them, or not yet."""
        sends, dtype, count, global_rank, tag = kind
        state, engine = self._state, self._state.engine
        member = global_rank in state.global_ranks
        rank = state.ranks[state.global_ranks.index(global_rank)] if member else engine.rank
        peer, nbytes, message = engine.rings.get(rank), count * dtype.itemsize, None
        if peer is None and rank != engine.rank and not engine.is_connected(rank):
            return None
        if peer is not None and dtype in UNPADDED and nbytes <= engine.eager_limit and tag in _TAGS:
            op = "send" if sends else "recv"
            header = frames.encode(Opcode.EAGER, code_of(dtype), state.group, engine.epoch, 0, 0, tag, nbytes)
            what = op, dtype, count, rank, tag
            message = self._core.Message(state, what, self._counts[op], header, peer, self._credits[rank], nbytes)
        if len(self) >= _MAX_KINDS:
            self.clear()
        self[kind] = message
        return message
