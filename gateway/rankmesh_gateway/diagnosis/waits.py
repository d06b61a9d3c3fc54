"""Waits of the ranks of a job: who waits in which call, for which ranks, and which calls are known of each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

from rankmesh_gateway.diagnosis.frames import Thread, location_of
from rankmesh_gateway.diagnosis.library_calls import LibraryCall, library_call
from rankmesh_gateway.diagnosis.reports import RankReport
from rankmesh_gateway.humanize import seconds

_ALL_EXCHANGE = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Collectives that no rank completes before all have begun them."""
_OVER = ("failed", "left")
_COMPUTES = 0.1
"""Cores that a process uses that does not just sleep."""


class Wait(NamedTuple):
    """A wait of a rank: the call as a label, its age, the ranks that it waits for; group and number of a collective."""

    kind: Literal["collective", "message", "store"]
    label: str
    age: float
    ranks: frozenset[int]
    group: str = ""
    seq: int = 0
    op: str = ""
    peer: int = -1
    tag: int = 0
    keys: Sequence[str] = ()


class JobView:
    """The ranks of one job, their places in the user's code, and their waits.

    Args:
        reports: the ranks.
        groups: the groups of any number of jobs as the gateway lists them.

    Attributes:
        job: its name.
        reports: the ranks that have joined, by rank.
        joining: the others.
        snapshots: those of the ranks that answer.
        silent: the live ranks that do not.
        observed: the observed ranks, with the calls of libraries in which they are, None if in none.
        groups: the groups in the snapshots, by id.
        waits: of the ranks that answer.
        places: the lines of the user's code where they are.
        blocked: those that wait in a call of RankMesh.
    """

    def __init__(self, reports: Sequence[RankReport], groups: Iterable[Mapping[str, Any]]) -> None:
        self.reports = {report.rank: report for report in reports if report.state != "joining"}
        self.joining = [report for report in reports if report.state == "joining"]
        self.job = reports[0].job
        self.snapshots = {rank: report.snapshot for rank, report in self.reports.items() if report.snapshot is not None}
        self.silent = {rank for rank, each in self.reports.items() if each.snapshot is None and each.state not in _OVER}
        self.observed = {
            rank: library_call(each["stacks"])
            for rank, each in self.snapshots.items()
            if each.get("unchanged") is not None
        }
        self._unchanged = min(
            (self.snapshots[rank]["unchanged"] for rank, call in self.observed.items() if call), default=0
        )
        self.groups = {group["id"]: group for each in self.snapshots.values() for group in each["groups"]}
        self._seqs = {
            rank: {group["id"]: group["seq"] for group in each["groups"]} for rank, each in self.snapshots.items()
        }
        epoch = reports[0].epoch
        self._reported = {each["id"]: each for each in groups if (each["job"], each["epoch"]) == (self.job, epoch)}
        self._completed: dict[str, int] = defaultdict(int)
        """By group, the number of the latest collective that all members have begun."""
        self._names: dict[tuple[str, int], str] = {}
        self._ended_ages: dict[tuple[str, int], float] = {}
        for each in self.snapshots.values():
            for call in each["calls"]:
                self._names.setdefault((call["group"], call["seq"]), call["call"])
            for call in each["ended"]:
                key = call["group"], call["seq"]
                self._names.setdefault(key, call["call"])
                self._ended_ages[key] = min(call["age"], self._ended_ages.get(key, call["age"]))
                if call["op"] in _ALL_EXCHANGE and not call.get("error"):  # agents of earlier versions leave it out
                    self._completed[call["group"]] = max(call["seq"], self._completed[call["group"]])
        self._missing: dict[tuple[str, int], frozenset[int]] = {}
        self.waits = {rank: list(self._waits_of(rank)) for rank in self.snapshots}
        self.places = {
            rank: self.reports[rank].place
            or location_of(each["stacks"], waits=any(wait.kind != "store" for wait in self.waits[rank]))
            for rank, each in self.snapshots.items()
            if not each["attached"]
        } | {rank: location_of(self._stacks_from_outside(rank), waits=False) for rank in self.silent}
        calls = {rank: call for rank, call in self.observed.items() if call is not None}
        self.places |= {rank: call.place for rank, call in calls.items()}
        self.blocked = calls.keys() | {rank for rank in self.snapshots if self.waits[rank] and self._is_inside(rank)}

    def computes(self, ranks: Iterable[int]) -> bool:
        """Return whether one of these ranks is observed, and uses the CPU."""
        return any(rank in self.observed and self.reports[rank].outside.cpu >= _COMPUTES for rank in ranks)

    def _stacks_from_outside(self, rank: int) -> list[Thread]:
        return [asdict(thread) for thread in self.reports[rank].outside.stacks]

    def _is_inside(self, rank: int) -> bool:
        """Return whether a rank is in a call of RankMesh; True if its stack does not tell."""
        place = self.places.get(rank)
        return place is None or place.in_rankmesh

    # Waits

    def _waits_of(self, rank: int) -> Iterator[Wait]:
        snapshot = self.snapshots[rank]
        begun: set[str] = set()
        for call in snapshot["calls"]:
            group = self.groups.get(call["group"], {"id": call["group"], "name": "?", "ranks": []})
            in_group = of_group(group["name"])
            if call["peer"] is not None:
                if call["awaited"]:
                    yield self._message_wait(rank, call, group, in_group)
            elif group["id"] not in begun:  # the calls behind it are queued
                begun.add(group["id"])
                number = f" #{call['seq']}" if call["seq"] else ""
                label = f"{call['op']}{number}{in_group}"
                missing = self._missing_from(group, call["seq"])
                missing = missing - {rank} if rank in missing else missing
                yield Wait("collective", label, call["age"], missing, group["id"], call["seq"], call["op"])
        if (called := self.observed.get(rank)) is not None:
            yield Wait(called.kind, called.name, self._unchanged, self._away_from(rank, called), op=called.op)
        for wait in snapshot["store_waits"]:
            yield Wait("store", f"store.{wait['op']}", wait["age"], frozenset(), op=wait["op"], keys=wait["keys"])

    def _away_from(self, rank: int, own: LibraryCall) -> frozenset[int]:
        """Return the ranks for which an observed rank may wait: those in no call, else the others in messages or calls.

        The ends of a message that both are there, and a collective at whose line all ranks are, do not wait for long.
        """
        calls = {other: call for other, call in self.observed.items() if call is not None}
        away = self.silent | (self.observed.keys() - calls.keys())
        messages = {other for other, call in calls.items() if call.kind == "message"} - {rank}
        return frozenset(away or messages or {other for other, call in calls.items() if call != own})

    def _missing_from(self, group: Mapping[str, Any], seq: int) -> frozenset[int]:
        """Return the members that are waited for in a collective: first those that have certainly not come."""
        key = group["id"], seq
        if key not in self._missing:
            members = [each for each in group["ranks"] if each in self.reports]
            away = {each for each in members if each in self.snapshots and not self._has_begun(each, *key)}
            unheard = {each for each in members if each in self.silent}
            late = {each for each in unheard if self._known_seq(each, group["id"]) < seq}
            self._missing[key] = frozenset(away | late or unheard)
        return self._missing[key]

    def _has_begun(self, rank: int, group: str, seq: int) -> bool:
        number = self._seqs[rank].get(group)
        return number is not None and int(number) >= seq

    def _message_wait(self, rank: int, call: Mapping[str, Any], group: Mapping[str, Any], in_group: str) -> Wait:
        peer = call["peer"]
        way = "to" if call["op"] == "send" else "from"
        other = "any rank" if peer < 0 else f"rank {peer}"
        label = f"{call['op']} {way} {other} (tag {call['tag']}){in_group}"
        partners = [each for each in group["ranks"] if each != rank] if peer < 0 else [peer]
        ranks = frozenset(each for each in partners if each in self.reports and not self._meets(rank, each, call))
        return Wait("message", label, call["age"], ranks, group["id"], 0, call["op"], peer, call["tag"])

    def _meets(self, rank: int, other: int, call: Mapping[str, Any]) -> bool:
        """Return whether a rank has the other end of a message in flight."""
        opposite = "recv" if call["op"] == "send" else "send"
        return other in self.snapshots and any(
            (each["op"], each["group"], each["tag"]) == (opposite, call["group"], call["tag"])
            and each["peer"] in (rank, -1)
            for each in self.snapshots[other]["calls"]
        )

    def _known_seq(self, rank: int, group: str) -> int:
        """Return the number of a collective that a rank that does not answer has begun, at least."""
        reported = self._reported.get(group, {}).get("seqs", {}).get(str(rank), 0)
        return max(int(reported), self._completed.get(group, 0))

    # Calls

    def last_of(self, rank: int, wait: Wait | None) -> str:
        """Return the latest collective that a rank that does not answer has begun, as far as others know."""
        if wait is None or wait.kind != "collective":
            reported = [(each["seqs"].get(str(rank), 0), key) for key, each in self._reported.items()]
            group = max(reported, default=(0, ""))[1]
        else:
            group = wait.group
        seq = self._known_seq(rank, group) if group else 0
        return self._call_name(group, seq) if seq else ""

    def _call_name(self, group: str, seq: int) -> str:
        known = self.groups.get(group) or self._reported.get(group) or {"name": "?"}
        return f"{self._names.get((group, seq), 'operation')} #{seq}{of_group(known['name'])}"

    def last_common(self, wait: Wait | None) -> str:
        """Return the last collective that all members of a wait's group have completed, and when."""
        if wait is None or wait.kind != "collective" or wait.seq < 1:
            return ""
        members = [rank for rank in self.groups[wait.group]["ranks"] if rank in self.snapshots]
        done = []
        for rank in members:
            active = [
                call["seq"]
                for call in self.snapshots[rank]["calls"]
                if call["group"] == wait.group and call["peer"] is None
            ]
            done.append(min(active) - 1 if active else self._seqs[rank].get(wait.group, 0))
        unheard = [rank for rank in self.groups[wait.group]["ranks"] if rank in self.silent]
        done += [min(self._known_seq(rank, wait.group), wait.seq - 1) for rank in unheard]
        seq = min(done, default=0)
        if seq < 1:
            return ""
        age = self._ended_ages.get((wait.group, seq))
        return self._call_name(wait.group, seq) + (f", {seconds(age)} ago" if age is not None else "")


def of_group(name: str) -> str:
    """Return a group's name as the end of a call's."""
    return "" if name == "world" else f" of {name}" if name.startswith("group") else f" of group {name}"
