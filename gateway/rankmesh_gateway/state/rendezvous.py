"""Rendezvous of the launchers of one job: the nodes of each of its attempts, and the attempts that follow it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NamedTuple

from rankmesh_agent.wire.errors import RankTakenError
from rankmesh_agent.wire.schemas import (
    FAILED_SECONDS,
    NO_NODE,
    STARTING,
    SUSPECT_SECONDS,
    LauncherHeartbeat,
    LauncherReply,
    LauncherState,
)
from rankmesh_agent.wire.store_frames import STORE_ID_BYTES
from rankmesh_gateway.state.validation import GatewayFullError, InvalidRequestError

MAX_LAUNCHERS = 4096
"""Maximum number of launchers of one job, spare ones included."""


class NodeChange(NamedTuple):
    """Change of a job's nodes, which ends an attempt: the ranks of a node that is lost, none if a node has joined."""

    reason: str
    lost_ranks: list[int]


class _Options(NamedTuple):
    """Options that are equal at all launchers of a job."""

    min_nodes: int
    max_nodes: int
    nproc: int
    max_restarts: int

    def __str__(self) -> str:
        nodes = str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"
        rest = f" --nproc-per-node {self.nproc} --max-restarts {self.max_restarts}" if self.nproc else ""
        return f"--nnodes {nodes}{rest}"


@dataclass
class _Launcher:
    """The launcher of one node; ``order``: position in the order in which the launchers came."""

    instance: str
    host: str
    attempt: int
    state: LauncherState
    node: int
    last_seen: float
    order: int
    hosts_gateway: bool
    knows: int = STARTING
    knows_end: bool = False


class RendezvousState:
    """The launchers of one job, which agree on its nodes and its restarts.

    An attempt waits for its nodes until the maximum is there, or the minimum and the last call is over. Launchers that
    live but still end the ranks of the attempt before are waited for. It ends, and the next one begins, with the
    first failure of a rank, when a node is lost, and when a node joins although the maximum is not there. A failure and
    a lost node use up a restart, a node that joins does not.

    If the number of nodes is fixed, each launcher has a node number of its own; a launcher that is replaced by another
    one with its number has failed, since its ranks have ended with it. Its silence alone is no failure.

    Attributes:
        reason: why the attempt has begun, empty for the first one; if the job has failed, why it is over.
        change: the change of the job's nodes with which the attempt began; None if it began otherwise.
        store: id of the store that the launchers share, if they are torchruns; else empty.
    """

    def __init__(self, beat: LauncherHeartbeat, attempt: int = 0) -> None:
        self.attempt = attempt
        self.over = False
        self.change: NodeChange | None = None
        self.store = secrets.token_hex(STORE_ID_BYTES) if beat.torchrun else ""
        self._terms = _terms(beat)
        self._restarts = 0
        self.reason = ""
        self._failed = False
        self._launchers: dict[str, _Launcher] = {}
        self._replaced: dict[str, int] = {}
        self._arrivals = 0
        self._members: dict[str, int] = {}
        self._size = 0
        self._enough_since: float | None = None
        self._first_end: float | None = None
        self._adopted = float("inf")
        """The clock at the first heartbeat of a node of an attempt that is older than the gateway."""
        self._before = STARTING
        """The latest attempt in the replies of earlier gateways: some nodes may have begun it."""

    @property
    def is_elastic(self) -> bool:
        """True if the nodes may change: no launcher has a number of its own."""
        return self._terms.min_nodes < self._terms.max_nodes or bool(self.store)

    @property
    def is_complete(self) -> bool:
        """True if the attempt has its nodes."""
        return self._size > 0

    def heartbeat(self, beat: LauncherHeartbeat, now: float) -> LauncherReply:
        """Record a heartbeat and return the state of the job."""
        launcher = self._record(beat, now)
        if not self.over:
            self._adopt(beat, now)
            if beat.state == "stopped":
                self._on_stop(launcher)
            elif beat.state == "closed":
                self._end(f"the launcher of {_name(launcher)} has ended the job")
            elif self.is_complete:
                self._on_report(launcher, now)
                self._find_joining(now)
                self._find_lost(now)
            if not self.is_complete:
                self._complete(now, beat.last_call)
            self.over = self.over or self._have_ended(now)
        launcher.knows, launcher.knows_end = self.attempt, self.over
        return LauncherReply(
            self.attempt,
            self.over,
            self._members.get(beat.instance, NO_NODE),
            self._size,
            self._restarts,
            self.reason,
            self._failed,
            self.change is not None,
            "" if self.is_complete or self.over else self._missing(now, beat.last_call),
            self.store,
        )

    def all_know(self, now: float) -> bool:
        """Return whether each launcher that is not silent has received which attempt the job is at."""
        return all(each.knows == self.attempt or not _is_live(each, now) for each in self._launchers.values())

    def all_know_end(self, now: float) -> bool:
        """Return whether each launcher that is not silent has received that the job is over."""
        return all(each.knows_end or not _is_live(each, now) for each in self._launchers.values())

    def knows(self, instance: str) -> bool:
        """Return whether a launcher is known."""
        return instance in self._launchers

    def last_seen(self) -> float:
        """Return the clock at the last heartbeat of any launcher."""
        return max((each.last_seen for each in self._launchers.values()), default=float("-inf"))

    def excuse(self, seconds: float) -> None:
        """Take some seconds off the silence of all launchers."""
        for each in self._launchers.values():
            each.last_seen += seconds

    def _record(self, beat: LauncherHeartbeat, now: float) -> _Launcher:
        """Record what a launcher reports of itself."""
        if _terms(beat) != self._terms:
            raise InvalidRequestError(
                f"the launchers of job {beat.job!r} differ: this one, on {beat.host or 'a host'}, has {_terms(beat)}, "
                f"the first one had {self._terms}; start all with the same options"
            )
        if beat.instance in self._replaced:
            node = self._replaced[beat.instance]
            raise RankTakenError(f"another launcher has come as node {node} of job {beat.job!r}: check --node-rank")
        known = self._launchers.get(beat.instance)
        if known is None:
            self._forget_silent(now)
            if len(self._launchers) >= MAX_LAUNCHERS:
                raise GatewayFullError(f"job {beat.job!r} has {MAX_LAUNCHERS} launchers; at most so many are allowed")
            order, self._arrivals = self._arrivals, self._arrivals + 1
            known = _Launcher(
                beat.instance, beat.host, beat.attempt, beat.state, beat.node, now, order, beat.hosts_gateway
            )
            if not self.is_elastic:
                self._replace(known)
            self._launchers[beat.instance] = known
            self._before = max(self._before, beat.awaits)
        known.attempt, known.state, known.last_seen = beat.attempt, beat.state, now
        known.node = self._members.get(beat.instance, beat.node)
        return known

    def _replace(self, new: _Launcher) -> None:
        """Have a new launcher take the place of the one with its node, whose ranks, if they ran, have ended with it."""
        for old in [each for each in self._launchers.values() if each.node == new.node != NO_NODE]:
            del self._launchers[old.instance]
            self._replaced[old.instance] = old.node
            if old.instance in self._members and not self.over:
                running = old.attempt == self.attempt and old.state == "running"
                del self._members[old.instance]
                if running:
                    self._fail("a rank failed on another node")
                elif old.state == "waiting":  # it had not begun
                    self._members[new.instance] = new.node

    def _adopt(self, beat: LauncherHeartbeat, now: float) -> None:
        """Learn the attempt from a launcher if the gateway is younger than that."""
        if beat.instance in self._members or beat.state == "stopped":
            return
        if beat.state == "waiting":
            if (before := max(beat.attempt, self._before)) >= self.attempt and not self.is_complete:
                self.attempt, self._restarts = before + 1, max(self._restarts, beat.restarts)
                self.reason = "the gateway was started again while nodes waited for each other"
            return
        if beat.attempt > self.attempt or (beat.attempt == self.attempt and not self.is_complete):
            self._members = {}
            self.attempt, self._restarts, self.reason, self.change = beat.attempt, beat.restarts, "", None
            self._size = beat.attempt_nodes or beat.nodes
            self._first_end, self._adopted = None, now
        if beat.attempt == self.attempt:
            self._members[beat.instance] = beat.node

    def _on_stop(self, launcher: _Launcher) -> None:
        if not self.is_elastic or launcher.hosts_gateway:
            self._end(f"the launcher of {_name(launcher)} was stopped")
        elif launcher.instance in self._members:
            self._lose(self._members[launcher.instance], f"{_name(launcher)} has left")
        launcher.last_seen = float("-inf")

    def _on_report(self, launcher: _Launcher, now: float) -> None:
        """Handle the report of a launcher whose node is part of the attempt."""
        if launcher.instance not in self._members:
            return
        if launcher.state == "waiting":  # its report of a failure was lost
            if launcher.attempt >= self.attempt:
                self._fail("a rank failed on another node")
        elif launcher.attempt == self.attempt and launcher.state == "failed":
            self._fail("a rank failed on another node")
        elif launcher.attempt == self.attempt and launcher.state == "ended" and self._first_end is None:
            self._first_end = now

    def _find_joining(self, now: float) -> None:
        """End the attempt if there are nodes to join it, or to take the places of those that have not reported."""
        unknown = self._unknown()
        full = self._size == self._terms.max_nodes and not unknown
        if not self.is_complete or full or self._first_end is not None or self.over:
            return
        if unknown and not self._were_awaited(now):
            return
        joining = [each for each in self._live(now) if each.state == "waiting" and each.instance not in self._members]
        if joining:
            size = min(self._size - len(unknown) + len(joining), self._terms.max_nodes)
            hosts = ", ".join(each.host for each in joining)
            what = f"node {hosts} joins" if len(joining) == 1 else f"nodes {hosts} join"
            reason = f"{what}: the job starts again with {size} nodes"
            self._begin(reason, NodeChange(reason, []))

    def _find_lost(self, now: float) -> None:
        """End the attempt if the launcher of one of its nodes is silent."""
        if not self.is_elastic or not self.is_complete or self._first_end is not None or self.over:
            return
        members = [each for each in self._launchers.values() if each.instance in self._members]
        lost = {self._members[each.instance]: _name(each) for each in members if now - each.last_seen >= FAILED_SECONDS}
        lost |= {node: f"node {node}" for node in self._unknown() if self._were_awaited(now)}
        if lost:
            node, name = next(iter(lost.items()))
            self._lose(node, f"{name} is lost: its launcher has been silent for {FAILED_SECONDS:g} s")

    def _unknown(self) -> set[int]:
        """Return the nodes of the attempt whose launchers this gateway does not know."""
        return set(range(self._size)) - set(self._members.values())

    def _were_awaited(self, now: float) -> bool:
        """Return whether unknown nodes, of an attempt that is older than the gateway, have had time to report."""
        return now - self._adopted >= FAILED_SECONDS

    def _lose(self, node: int, reason: str) -> None:
        first = node * self._terms.nproc
        self._fail(reason, NodeChange(reason, list(range(first, first + self._terms.nproc))))

    def _fail(self, reason: str, change: NodeChange | None = None) -> None:
        if self._restarts < self._terms.max_restarts:
            self._restarts += 1
            self._begin(reason, change)
        else:
            self._end(reason, change)

    def _begin(self, reason: str, change: NodeChange | None) -> None:
        """Begin the next attempt, which waits for its nodes."""
        self.attempt = max(self.attempt, self._before) + 1
        self.reason, self.change = reason, change
        self._members, self._size = {}, 0
        self._enough_since = self._first_end = None
        self._adopted = float("inf")

    def _end(self, reason: str, change: NodeChange | None = None) -> None:
        """End the job after a failure."""
        self.over = self._failed = True
        self.reason, self.change = reason, change

    def _complete(self, now: float, last_call: float) -> None:
        """Give the attempt its nodes if enough are there."""
        live = self._live(now)
        if len(live) < self._terms.min_nodes:
            self._enough_since = None
            return
        if self._enough_since is None:
            self._enough_since = now
        if any(each.state != "waiting" for each in live):
            return
        if len(live) < self._terms.max_nodes and now - self._enough_since < last_call:
            return
        live.sort(key=lambda each: (not each.hosts_gateway, -each.attempt, each.order))
        self._assign(live[: self._terms.max_nodes])

    def _assign(self, chosen: list[_Launcher]) -> None:
        """Number the nodes: the one with the gateway is node 0, the others keep their numbers where possible."""
        free = set(range(len(chosen)))
        wanted = {each.instance: 0 if each.hosts_gateway and self.is_elastic else each.node for each in chosen}
        for each in chosen:
            if wanted[each.instance] in free:
                self._members[each.instance] = wanted[each.instance]
                free.remove(wanted[each.instance])
        rest = [each for each in chosen if each.instance not in self._members]
        self._members |= {each.instance: node for each, node in zip(rest, sorted(free), strict=True)}
        self._size = len(chosen)

    def _have_ended(self, now: float) -> bool:
        """Return whether the ranks of all nodes have ended; of nodes that are silent after the first end, too."""
        if self._first_end is None:
            return False
        ended = 0
        for instance in self._members:
            each = self._launchers[instance]
            silent = now - max(self._first_end, each.last_seen) >= FAILED_SECONDS
            ended += silent or (each.attempt == self.attempt and each.state == "ended")
        return ended == len(self._members) and (not self._unknown() or now - self._first_end >= FAILED_SECONDS)

    def _missing(self, now: float, last_call: float) -> str:
        """Return which nodes are there for an attempt, and what is missing."""
        live = self._live(now)
        ready = [each for each in live if each.state == "waiting"]
        least = self._terms.min_nodes
        text = f"{len(ready)} of {'at least ' if least < self._terms.max_nodes else ''}{least} node(s) are there: "
        text += ", ".join(sorted(_name(each) for each in ready)) or "none"
        if busy := [_name(each) for each in live if each.state != "waiting"]:
            text += f"; {', '.join(busy)} end(s) the ranks of the attempt before"
        elif self.is_elastic and self._enough_since is not None:
            text += f"; the last call ends in {max(0.0, self._enough_since + last_call - now):.0f} s"
        if not self.is_elastic:
            absent = sorted(set(range(least)) - {each.node for each in live})
            text += "; missing: node " + ", ".join(map(str, absent)) if absent else ""
        return text

    def _live(self, now: float) -> list[_Launcher]:
        return [each for each in self._launchers.values() if _is_live(each, now)]

    def _forget_silent(self, now: float) -> None:
        gone = [
            each.instance
            for each in self._launchers.values()
            if now - each.last_seen >= FAILED_SECONDS and each.instance not in self._members
        ]
        for instance in gone:
            del self._launchers[instance]


def _terms(beat: LauncherHeartbeat) -> _Options:
    return _Options(beat.min_nodes or beat.nodes, beat.nodes, beat.nproc, beat.max_restarts)


def _is_live(launcher: _Launcher, now: float) -> bool:
    return now - launcher.last_seen <= SUSPECT_SECONDS


def _name(launcher: _Launcher) -> str:
    if launcher.node == NO_NODE:
        return launcher.host
    return f"node {launcher.node}" + (f" ({launcher.host})" if launcher.host else "")
