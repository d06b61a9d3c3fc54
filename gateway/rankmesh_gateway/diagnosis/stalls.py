"""The rules of ``rankmesh diagnose``: from reports on ranks to findings in words. Pure: no I/O, no clock.

Each rank that waits in a call waits for ranks: the members that have not come to a collective, the other end of a
message. A rank that others wait for, and that waits for none itself, holds them up; so does a circle of ranks that wait
for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from rankmesh_gateway.diagnosis.graph import final_components, reaching
from rankmesh_gateway.diagnosis.reports import NO_DUMP, RankReport
from rankmesh_gateway.diagnosis.sentences import JobSentences, subject, verb
from rankmesh_gateway.diagnosis.waits import Wait, of_group
from rankmesh_gateway.humanize import seconds
from rankmesh_gateway.schemas import HELD_UP_SECONDS, Stall, StallKind

MIN_SECONDS = 1.0
"""Age below which a wait is no finding: every step of a job waits a little."""
_SAME_ARGUMENTS = frozenset({"all_reduce", "broadcast", "barrier"})
"""Collectives whose arguments are equal at all ranks."""

_ORDER: Sequence[StallKind] = get_args(StallKind)


def find_stalls(
    reports: Sequence[RankReport], groups: Sequence[Mapping[str, Any]] = (), *, over: bool = False
) -> list[Stall]:
    """Return the findings, the most certain first.

    Args:
        reports: the ranks of any number of jobs.
        groups: their groups as the gateway lists them: what it knows of the ranks that do not answer.
        over: whether the jobs are over: then every wait is a finding, however young.
    """
    jobs: dict[str, list[RankReport]] = defaultdict(list)
    for report in reports:
        jobs[report.job].append(report)
    found = [each for job in jobs.values() for each in _WaitForGraph(job, groups, over=over).find_stalls()]
    return sorted(found, key=lambda each: (_ORDER.index(each.kind), -each.seconds))


def find_failures(reports: Sequence[RankReport]) -> Iterator[Stall]:
    """Yield a finding on each rank of a job that failed by itself, the earliest first, and those that it took along."""
    failed = sorted((each for each in reports if each.state == "failed"), key=lambda each: -each.heartbeat_age)
    causes = [each for each in failed if not each.failed_ranks] or failed[:1]
    victims: dict[int, list[int]] = {cause.rank: [] for cause in causes}
    for each in failed:
        if each.rank not in victims:
            victims[next((rank for rank in each.failed_ranks if rank in victims), causes[0].rank)].append(each.rank)
    for cause in causes:
        text = f"{cause.name} has failed: {cause.reason or 'it was silent'}"
        if after := sorted(victims[cause.rank]):
            text += f"; {subject(after)} failed because of it"
        yield Stall("failed", cause.job, [cause.rank], text, "look at its output, and start the job again")


class _WaitForGraph(JobSentences):
    """Wait-for graph of one job, and its findings."""

    def __init__(self, reports: Sequence[RankReport], groups: Iterable[Mapping[str, Any]], *, over: bool) -> None:
        super().__init__(reports, groups)
        self._min_seconds, self._slow_seconds = (0.0, 0.0) if over else (MIN_SECONDS, HELD_UP_SECONDS)
        self._mismatched: set[tuple[str, int]] = set()

    def find_stalls(self) -> Iterator[Stall]:
        """Yield the findings on the job."""
        if self._joining:
            yield self._joining_stall()
        yield from find_failures(list(self._reports.values()))
        edges = {rank: frozenset(each for wait in self._waits[rank] for each in wait.ranks) for rank in self._snapshots}
        blocked = {rank: edges[rank] if rank in self._blocked else frozenset[int]() for rank in self._snapshots}
        blocked |= dict.fromkeys(self._silent, frozenset())
        for group in self._groups.values():
            if finding := self._mismatch(group, blocked):
                yield finding
        causes: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for component in final_components(blocked):
            if len(component) > 1:
                if finding := self._circle(sorted(component), blocked):
                    yield finding
                continue
            (rank,) = component
            key = self._cause(rank, edges)
            if key is not None:
                causes[key].append(rank)
        for (kind, *_), ranks in causes.items():
            direct = self._direct(ranks)
            behind = sorted(reaching(blocked, {each for each, _ in direct}) - set(ranks))
            found = self._stall(kind, sorted(ranks), direct, behind)
            found.young = kind in ("elsewhere", "key") and found.seconds < self._slow_seconds
            if found.seconds >= self._min_seconds or kind in ("stopped", "ended", "silent"):
                yield found

    def _cause(self, rank: int, edges: Mapping[int, Collection[int]]) -> tuple[Any, ...] | None:
        """Return the kind of a rank that waits for none, and what else findings must share to be one; or None."""
        if self._reports[rank].state == NO_DUMP:
            return ("silent", self._reports[rank].error)
        if rank in self._silent:
            process = self._reports[rank].process
            return ("stopped" if process in ("T", "t") else "ended" if process in ("-", "Z", "X") else "silent", rank)
        if rank not in self._snapshots:
            return None
        store = [wait for wait in self._waits[rank] if wait.kind == "store"]
        direct = self._direct([rank])
        if store and rank in self._blocked:
            return ("key", tuple(store[0].keys))
        if direct:
            first, wait = direct[0]
            return ("elsewhere", wait.label, -1 if wait.kind == "collective" else first)
        calls = [wait for wait in self._waits[rank] if wait.kind != "store" and wait.age >= self._slow_seconds]
        if rank in self._blocked and calls and not edges[rank]:
            wait = calls[0]
            if (wait.group, wait.seq) in self._mismatched:
                return None
            ends = [] if wait.kind == "collective" else sorted((rank, wait.peer))
            return ("slow", wait.group, wait.seq, wait.tag, *ends)
        return None

    def _direct(self, ranks: Collection[int]) -> list[tuple[int, Wait]]:
        """Return the waits for any of these ranks, the oldest first."""
        found = [
            (rank, wait)
            for rank, waits in self._waits.items()
            for wait in waits
            if rank not in ranks and not wait.ranks.isdisjoint(ranks)
        ]
        return sorted(found, key=lambda each: -each[1].age)

    def _stall(self, kind: StallKind, ranks: list[int], direct: list[tuple[int, Wait]], behind: list[int]) -> Stall:
        """Return the finding on ranks that wait for none.

        Args:
            kind: see _cause.
            ranks: the ranks.
            direct: the waits of others for them, the oldest first.
            behind: the ranks that wait for those, in turn.
        """
        own = [wait for rank in ranks for wait in self._waits.get(rank, [])]
        awaited = [wait for _, wait in direct]
        wait = next(iter(awaited or own), None)
        age = max((each.age for each in awaited or own), default=0.0)
        parts: Iterable[str]
        if kind in ("stopped", "ended", "silent"):
            parts = self._without_answer(ranks, wait, direct, age)
        elif kind == "key":
            keys = [each for each in own if each.kind == "store"]
            age = max(age, *(each.age for each in keys))
            parts = self._without_key(ranks, keys[0], direct, age)
        elif kind == "slow":
            parts = self._slow(ranks, own[0], age)
        else:
            parts = self._elsewhere(ranks, direct, age)
        waiting = sorted({each for each, _ in direct})
        indirect = [rank for rank in behind if rank not in waiting]
        if indirect:
            parts = [*parts, f"behind {'it' if len(waiting) == 1 else 'them'} {self._waiting_at(indirect)}"]
        return Stall(
            kind,
            self._job,
            ranks,
            "; ".join(filter(None, parts)),
            self._remedy(kind, ranks),
            age,
            "" if wait is None else wait.label,
            sorted({*waiting, *indirect}),
            self._last_common(wait),
            self._place_texts([*ranks, *waiting, *indirect]),
        )

    def _circle(self, ranks: list[int], blocked: Mapping[int, Collection[int]]) -> Stall | None:
        """Return the finding on ranks that wait for each other; None if the wait is young."""
        waits = {rank: next(wait for wait in self._waits[rank] if not wait.ranks.isdisjoint(ranks)) for rank in ranks}
        age = min(wait.age for wait in waits.values())
        if age < self._min_seconds:
            return None
        kinds = {wait.kind for wait in waits.values()}
        ops = {wait.op for wait in waits.values()}
        kind: StallKind = "order" if kinds != {"message"} else "messages" if len(ops) == 1 else "tags"
        by_label: dict[str, list[int]] = defaultdict(list)
        for rank, wait in waits.items():
            by_label[wait.label].append(rank)
        parts = [f"{subject(ranks)} wait for each other for {seconds(age)}: {self._in_calls(by_label)}"]
        behind = sorted(reaching(blocked, set(ranks)) - set(ranks))
        if behind:
            parts.append(f"behind them {self._waiting_at(behind)}")
        remedies: dict[str, str] = {
            "order": "make these calls in one order on all ranks",
            "mixed": "the other end of the message is missing, or comes behind the collective: make them in one order",
            "send": "let one of them receive first, or use isend and irecv, or batch_isend_irecv",
            "recv": "let one of them send: nothing is on its way to either",
            "tags": "send and receive with equal tags, or in one order",
        }
        remedy = remedies[next(iter(ops)) if kind == "messages" else "mixed" if len(kinds) > 1 else kind]
        first = waits[ranks[0]]
        places = self._place_texts([*ranks, *behind])
        last = self._last_common(next((wait for wait in waits.values() if wait.kind == "collective"), None))
        return Stall(kind, self._job, ranks, "; ".join(parts), remedy, age, first.label, behind, last, places)

    def _mismatch(self, group: Mapping[str, Any], blocked: Mapping[int, Collection[int]]) -> Stall | None:
        """Return the finding on ranks that make different collectives under one number, the earliest in flight."""
        waits = [
            wait
            for waits in self._waits.values()
            for wait in waits
            if wait.kind == "collective" and wait.group == group["id"] and wait.seq
        ]
        seq = min((wait.seq for wait in waits), default=0)
        age = max((wait.age for wait in waits if wait.seq == seq), default=0.0)
        if not seq or age < self._min_seconds:
            return None
        by_call: dict[str, list[int]] = defaultdict(list)
        ops: set[str] = set()
        for rank, snapshot in self._snapshots.items():
            calls = {
                (call["op"], call["call"] if call["op"] in _SAME_ARGUMENTS else call["op"])
                for call in [*snapshot["calls"], *snapshot["ended"]]
                if (call["group"], call["seq"], call["peer"]) == (group["id"], seq, None)
            }
            if calls:
                by_call[", ".join(sorted(text for _, text in calls))].append(rank)
                ops.update(op for op, _ in calls)
        if len(by_call) < 2:
            return None
        self._mismatched.add((group["id"], seq))
        most = max(by_call.values(), key=len)
        everyone = sorted(rank for there in by_call.values() for rank in there)
        ranks = [rank for rank in everyone if rank not in most or 2 * len(most) <= len(everyone)]
        number = f"collective #{seq}{of_group(group['name'])}"
        behind = sorted((reaching(blocked, set(everyone)) | set(everyone)) - set(ranks))
        parts = [f"{number} differs between the ranks for {seconds(age)}: {self._in_calls(by_call)}"]
        if indirect := [rank for rank in behind if rank not in everyone]:
            parts.append(f"behind them {self._waiting_at(indirect)}")
        remedy = "make these calls in one order on all ranks" if len(ops) > 1 else "give equal arguments on all ranks"
        last = self._last_common(next(wait for wait in waits if wait.seq == seq))
        places = self._place_texts([*ranks, *behind])
        return Stall("order", self._job, ranks, "; ".join(parts), remedy, age, number, behind, last, places)

    def _joining_stall(self) -> Stall:
        known = sorted(report.rank for report in self._joining if report.rank >= 0)
        there = subject(known) if known else f"{len(self._joining)} processes without a rank"
        text = f"job {self._job} waits for more ranks to join; {there} {verb(self._joining, 'is', 'are')} there"
        return Stall("joining", self._job, known, text, "look at the output of the ranks that are missing")
