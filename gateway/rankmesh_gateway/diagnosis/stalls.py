"""The rules of ``rankmesh diagnose``: from reports on ranks to findings in words. Pure: no I/O, no clock.

Each rank that waits in a call waits for ranks: the members that have not come to a collective, the other end of a
message. A rank that others wait for, and that waits for none itself, holds them up; so does a circle of ranks that wait
for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from rankmesh_gateway import humanize
from rankmesh_gateway.diagnosis.frames import SourceLocation
from rankmesh_gateway.diagnosis.graph import final_components, reaching
from rankmesh_gateway.diagnosis.reports import DUMPED, NO_DUMP, RankReport
from rankmesh_gateway.diagnosis.waits import JobWaits, Wait, of_group
from rankmesh_gateway.humanize import seconds
from rankmesh_gateway.schemas import HELD_UP_SECONDS, Stall, StallKind

MIN_SECONDS = 1.0
"""Age below which a wait is no finding: every step of a job waits a little."""
_SAME_ARGUMENTS = frozenset({"all_reduce", "broadcast", "barrier"})
"""Collectives whose arguments are equal at all ranks."""
_NAMED = 4
"""Maximum number of places, and of keys, in a sentence."""

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


class _WaitForGraph(JobWaits):
    """Wait-for graph of one job, and its findings."""

    def __init__(self, reports: Sequence[RankReport], groups: Iterable[Mapping[str, Any]], *, over: bool) -> None:
        super().__init__(reports, groups)
        self._min_seconds, self._slow_seconds = (0.0, 0.0) if over else (MIN_SECONDS, HELD_UP_SECONDS)
        self._mismatched: set[tuple[str, int]] = set()

    def find_stalls(self) -> Iterator[Stall]:
        """Yield the findings on the job."""
        if self._joining:
            yield self._joining_stall()
        for rank, report in self._reports.items():
            if report.state == "failed":
                reason = report.reason or "it was silent"
                text = f"{report.name} has failed: {reason}"
                yield Stall("failed", self._job, [rank], text, "look at its output, and start the job again")
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

    # Sentences

    def _stall(self, kind: StallKind, ranks: list[int], direct: list[tuple[int, Wait]], behind: list[int]) -> Stall:
        own = [(rank, wait) for rank in ranks for wait in self._waits.get(rank, [])]
        wait = direct[0][1] if direct else own[0][1] if own else None
        age = max([each.age for _, each in direct or own], default=0.0)
        subject = _subject(ranks)
        parts: list[str] = []
        if kind in ("stopped", "ended", "silent"):
            report = self._reports[ranks[0]]
            if report.state == NO_DUMP:
                parts.append(f"{subject} left no dump" + (f" ({report.error})" if report.error else ""))
            else:
                parts.append(f"{subject} does not answer: {self._state_of(ranks[0])}")
            if len(ranks) == 1 and (last := self._last_of(ranks[0], wait)):
                parts.append(f"its last operation was {last}")
            if direct:
                parts.append(f"{self._waiters(direct)} in {direct[0][1].label} for {seconds(age)}")
        elif kind == "key":
            keys = next(each for _, each in own if each.kind == "store")
            age = max(age, *(each.age for _, each in own if each.kind == "store"))
            has, verb = ("key", "is") if len(keys.keys) == 1 else ("keys", "are not all")
            names = ", ".join(map(repr, keys.keys[:_NAMED])) + (", ..." if len(keys.keys) > _NAMED else "")
            parts.append(
                f"{subject} {_verb(ranks, 'waits', 'wait')} in {keys.label} for {has} {names}, which "
                f"{'no rank has set' if verb == 'is' else 'are not all set'}, for {seconds(age)}"
            )
            parts.append(self._whereabouts(ranks))
            if direct:
                parts.append(f"{self._waiters(direct)} in {direct[0][1].label}")
        elif kind == "slow":
            assert wait is not None
            there = "all ranks" if wait.kind == "collective" else "both ranks"
            parts.append(f"{there} have come to {wait.label}, and it goes on for {seconds(age)}")
            parts.append(self._whereabouts(ranks))
        else:
            assert wait is not None
            what = wait.label if wait.kind == "collective" else f"{wait.label}, where rank {direct[0][0]} waits,"
            parts.append(f"{subject} {_verb(ranks, 'has', 'have')} not come to {what} for {seconds(age)}")
            parts.append(self._whereabouts(ranks))
            if len(ranks) == 1 and self._reports[ranks[0]].last:
                parts.append(f"its last operation was {self._reports[ranks[0]].last}")
            parts.append(self._waiters(direct))
        waiting = sorted({each for each, _ in direct})
        if indirect := [rank for rank in behind if rank not in waiting]:
            parts.append(f"behind {_it(waiting)} {self._waiting_at(indirect)}")
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
        each = [
            f"{_subject(there)} {_verb(there, 'is', 'are')} in {label}{self._at(there)}"
            for label, there in by_label.items()
        ]
        parts = [f"{_subject(ranks)} wait for each other for {seconds(age)}: {', '.join(each[:_NAMED])}"]
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
        each = [
            f"{_subject(there)} {_verb(there, 'is', 'are')} in {call}{self._at(there)}"
            for call, there in by_call.items()
        ]
        number = f"collective #{seq}{of_group(group['name'])}"
        behind = sorted((reaching(blocked, set(everyone)) | set(everyone)) - set(ranks))
        parts = [f"{number} differs between the ranks for {seconds(age)}: {', '.join(each[:_NAMED])}"]
        if indirect := [rank for rank in behind if rank not in everyone]:
            parts.append(f"behind them {self._waiting_at(indirect)}")
        remedy = "make these calls in one order on all ranks" if len(ops) > 1 else "give equal arguments on all ranks"
        last = self._last_common(next(wait for wait in waits if wait.seq == seq))
        places = self._place_texts([*ranks, *behind])
        return Stall("order", self._job, ranks, "; ".join(parts), remedy, age, number, behind, last, places)

    def _joining_stall(self) -> Stall:
        known = sorted(report.rank for report in self._joining if report.rank >= 0)
        there = _subject(known) if known else f"{len(self._joining)} processes without a rank"
        text = f"job {self._job} waits for more ranks to join; {there} {_verb(self._joining, 'is', 'are')} there"
        return Stall("joining", self._job, known, text, "look at the output of the ranks that are missing")

    def _state_of(self, rank: int) -> str:
        report = self._reports[rank]
        where = f"process {report.pid} on {report.host}"
        states = {
            "T": f"{where} is stopped (SIGSTOP, or Ctrl-Z)",
            "t": f"{where} is stopped by a debugger",
            "-": f"{where} has ended",
            "Z": f"{where} has ended",
            "X": f"{where} has ended",
            "R": f"{where} computes, and the agent's thread in it does not run",
            "S": f"{where} is alive, and the agent's thread in it does not run",
            "D": f"{where} waits in the kernel, for a disk perhaps",
        }
        return states.get(report.process, f"{report.error} from {report.url} ({where})")

    def _whereabouts(self, ranks: Sequence[int]) -> str:
        """Return where ranks are: ``it is at x.py:8 in f``, ``ranks 2-3 are at x.py:8``."""
        if len(ranks) == 1:
            return self._at(ranks, "it is at ")
        return self._listed(ranks, "is at", "are at")

    def _waiters(self, direct: Sequence[tuple[int, Wait]]) -> str:
        return self._waiting_at(sorted({rank for rank, _ in direct}))

    def _waiting_at(self, ranks: Sequence[int]) -> str:
        return self._listed(ranks, "waits at", "wait at")

    def _listed(self, ranks: Sequence[int], one: str, several: str) -> str:
        by_place: dict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            by_place[self._place_text(rank)].append(rank)
        texts = []
        for text, there in by_place.items():
            verb = _verb(there, one, several)
            texts.append(f"{_subject(there)} {f'{verb} {text}' if text else verb.removesuffix(' at')}")
        more = sum(len(there) for there in list(by_place.values())[_NAMED:])
        return ", ".join([*texts[:_NAMED], *([f"{more} more elsewhere"] if more else [])])

    def _at(self, ranks: Sequence[int], before: str = " at ") -> str:
        texts = list(dict.fromkeys(filter(None, map(self._place_text, ranks))))
        return f"{before}{' and '.join(texts[:2])}" if texts else ""

    def _place_text(self, rank: int) -> str:
        place = self._places.get(rank)
        return "" if place is None else str(place)

    def _place_texts(self, ranks: Iterable[int]) -> dict[int, str]:
        places: dict[int, SourceLocation | None] = {rank: self._places.get(rank) for rank in sorted(set(ranks))}
        return {rank: f"{place.file}:{place.line}" for rank, place in places.items() if place is not None}

    def _remedy(self, kind: StallKind, ranks: Sequence[int]) -> str:
        report = self._reports[ranks[0]]
        numbers = " ".join(map(str, ranks[:_NAMED]))
        if kind == "stopped":
            return f"'kill -CONT {report.pid}' on {report.host} lets it go on"
        if kind == "ended":
            return "look at its output, and start the job again"
        if report.state == NO_DUMP:
            whose = "its" if len(ranks) == 1 else "their"
            return f"look at {whose} output: a rank that has ended, or is held up in C code, writes no dump"
        if kind == "silent" and report.process:
            return (
                "C code that holds the interpreter's lock (GIL) is the likely cause: 'py-spy dump --native --pid "
                f"{report.pid}' or gdb on {report.host} shows it"
            )
        if kind == "silent":
            return f"see on {report.host} whether process {report.pid} runs; 'rankmesh doctor' measures the network"
        if kind == "key":
            by_hand = "" if report.state == DUMPED else "; 'rankmesh store set' sets it by hand"
            return f"look for the rank that should set it{by_hand}"
        if kind == "slow":
            return "'rankmesh doctor' measures the paths between the ranks"
        if all(self._snapshots[rank]["attached"] for rank in ranks if rank in self._snapshots):
            return "look at the stack of its process ('py-spy dump'): the agent that it is attached to does not have it"
        if report.state == DUMPED:
            known = self._places.get(ranks[0]) is not None
            return "look at that line" if known else "look at its output: the dump has no line of a rank without a call"
        return f"look at that line; 'rankmesh stacks {numbers}' has the whole stack"


def _subject(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {humanize.ranks(ranks)}"


def _verb(ranks: Sequence[Any], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _it(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"
