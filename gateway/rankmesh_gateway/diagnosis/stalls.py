"""The rules of ``rankmesh diagnose``: from reports on ranks to findings in words. Pure: no I/O, no clock.

Each rank that waits in a call waits for ranks: the members that have not come to a collective, the other end of a
message. A rank that others wait for, and that waits for none itself, holds them up; so does a circle of ranks that wait
for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from rankmesh_gateway.diagnosis import sentences
from rankmesh_gateway.diagnosis.graph import final_components, reaching
from rankmesh_gateway.diagnosis.reports import NO_DUMP, RankReport
from rankmesh_gateway.diagnosis.sentences import subject, verb
from rankmesh_gateway.diagnosis.waits import JobView, Wait, of_group
from rankmesh_gateway.humanize import failed_text, seconds
from rankmesh_gateway.schemas import HELD_UP_SECONDS, Finding, FindingKind

MIN_SECONDS = 1.0
"""Age below which a wait is no finding: every step of a job waits a little."""
_COMPUTES_SECONDS = 60.0
"""Age up to which a wait for an observed rank that computes is young: looks at a stack may miss its progress."""
_SAME_ARGUMENTS = frozenset({"all_reduce", "broadcast", "barrier"})
"""Collectives whose arguments are equal at all ranks."""

_ORDER: Sequence[FindingKind] = get_args(FindingKind)


def find_stalls(
    reports: Sequence[RankReport], groups: Sequence[Mapping[str, Any]] = (), *, over: bool = False
) -> list[Finding]:
    """Return the findings, the most certain first.

    Args:
        groups: as the gateway lists them: what it knows of the ranks that do not answer.
        over: whether the jobs are over: then every wait is a finding, however young.
    """
    jobs: dict[str, list[RankReport]] = defaultdict(list)
    for report in reports:
        jobs[report.job].append(report)
    found = [each for job in jobs.values() for each in _find(JobView(job, groups), over=over)]
    return sorted(found, key=lambda each: (_ORDER.index(each.kind), -each.seconds))


def find_failures(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Yield a finding on each rank of a job that failed by itself, the earliest first, and those that it took along."""
    failed = sorted((each for each in reports if each.state == "failed"), key=lambda each: -each.heartbeat_age)
    causes = [each for each in failed if not each.failed_ranks] or failed[:1]
    victims: dict[int, list[int]] = {cause.rank: [] for cause in causes}
    for each in failed:
        if each.rank not in victims:
            victims[next((rank for rank in each.failed_ranks if rank in victims), causes[0].rank)].append(each.rank)
    for cause in causes:
        text = failed_text(cause.name, cause.reason)
        if after := sorted(victims[cause.rank]):
            text += f"; {subject(after)} failed because of it"
        remedy = "look at its output, and start the job again"
        yield Finding("failed", cause.job, [cause.rank], text, remedy, cause.heartbeat_age, severity="failed")


def _find(view: JobView, *, over: bool) -> Iterator[Finding]:
    """Yield the findings on a job."""
    min_seconds, slow_seconds = (0.0, 0.0) if over else (MIN_SECONDS, HELD_UP_SECONDS)
    mismatched = set[tuple[str, int]]()
    if view.joining:
        yield _joining_stall(view)
    yield from find_failures(list(view.reports.values()))
    edges = {rank: frozenset(each for wait in view.waits[rank] for each in wait.ranks) for rank in view.snapshots}
    blocked = {rank: edges[rank] if rank in view.blocked else frozenset[int]() for rank in view.snapshots}
    blocked |= dict.fromkeys(view.silent, frozenset())
    for group in view.groups.values():
        seq, finding = _mismatch(view, group, blocked)
        if finding is not None and finding.seconds >= min_seconds:
            mismatched.add((group["id"], seq))
            yield finding
    causes: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for component in final_components(blocked):
        if len(component) > 1:
            finding = _circle(view, sorted(component), blocked)
            if finding.seconds >= min_seconds:
                yield finding
            continue
        (rank,) = component
        key = _cause(view, rank, edges, slow_seconds, mismatched)
        if key is not None:
            causes[key].append(rank)
    for (kind, *_), ranks in causes.items():
        direct = _direct(view, ranks)
        behind = sorted(reaching(blocked, {each for each, _ in direct}) - set(ranks))
        found = _stall(view, kind, sorted(ranks), direct, behind)
        young_seconds = _COMPUTES_SECONDS if view.computes(ranks) else slow_seconds
        found.young = kind in ("elsewhere", "key") and found.seconds < young_seconds
        if found.seconds >= min_seconds or kind in ("stopped", "ended", "silent"):
            yield found


def _cause(
    view: JobView,
    rank: int,
    edges: Mapping[int, Collection[int]],
    slow_seconds: float,
    mismatched: Collection[tuple[str, int]],
) -> tuple[Any, ...] | None:
    """Return the kind of a rank that waits for none, and what else findings must share to be one; or None."""
    if view.reports[rank].state == NO_DUMP:
        return ("silent", view.reports[rank].error)
    if rank in view.silent:
        outside = view.reports[rank].outside
        stopped = outside.frozen or outside.state in ("T", "t")
        return ("stopped" if stopped else "ended" if outside.state in ("-", "Z", "X") else "silent", rank)
    if rank not in view.snapshots:
        return None
    store = [wait for wait in view.waits[rank] if wait.kind == "store"]
    direct = _direct(view, [rank])
    if store and rank in view.blocked:
        return ("key", tuple(store[0].keys))
    if direct:
        first, wait = direct[0]
        return ("elsewhere", wait.label, -1 if wait.kind == "collective" else first)
    calls = [wait for wait in view.waits[rank] if wait.kind != "store" and wait.age >= slow_seconds]
    if rank in view.blocked and calls and not edges[rank]:
        wait = calls[0]
        if (wait.group, wait.seq) in mismatched:
            return None
        ends = [] if wait.kind == "collective" else sorted((rank, wait.peer))
        return ("slow", wait.group, wait.seq, wait.tag, *ends)
    return None


def _direct(view: JobView, ranks: Collection[int]) -> list[tuple[int, Wait]]:
    """Return the waits for any of these ranks, the oldest first."""
    found = [
        (rank, wait)
        for rank, waits in view.waits.items()
        for wait in waits
        if rank not in ranks and not wait.ranks.isdisjoint(ranks)
    ]
    return sorted(found, key=lambda each: -each[1].age)


def _stall(
    view: JobView, kind: FindingKind, ranks: list[int], direct: list[tuple[int, Wait]], behind: list[int]
) -> Finding:
    """Return the finding on ranks that wait for none; ``direct``: see _direct; ``behind``: who waits for those."""
    own = [wait for rank in ranks for wait in view.waits.get(rank, [])]
    awaited = [wait for _, wait in direct]
    wait = next(iter(awaited or own), None)
    age = max((each.age for each in awaited or own), default=0.0)
    parts: Iterable[str]
    if kind in ("stopped", "ended", "silent"):
        parts = sentences.without_answer(view, ranks, wait, direct, age)
    elif kind == "key":
        keys = [each for each in own if each.kind == "store"]
        age = max(age, *(each.age for each in keys))
        parts = sentences.without_key(view, ranks, keys[0], direct, age)
    elif kind == "slow":
        parts = sentences.slow(view, ranks, own[0], age)
    else:
        parts = sentences.elsewhere(view, ranks, direct, age)
    waiting = sorted({each for each, _ in direct})
    indirect = [rank for rank in behind if rank not in waiting]
    if indirect:
        parts = [*parts, f"behind {'it' if len(waiting) == 1 else 'them'} {sentences.waiting_at(view, indirect)}"]
    return Finding(
        kind,
        view.job,
        ranks,
        "; ".join(filter(None, parts)),
        sentences.remedy(view, kind, ranks),
        age,
        "" if wait is None else wait.label,
        sorted({*waiting, *indirect}),
        view.last_common(wait),
        sentences.place_texts(view, [*ranks, *waiting, *indirect]),
    )


def _circle(view: JobView, ranks: list[int], blocked: Mapping[int, Collection[int]]) -> Finding:
    """Return the finding on ranks that wait for each other."""
    waits = {rank: next(wait for wait in view.waits[rank] if not wait.ranks.isdisjoint(ranks)) for rank in ranks}
    age = min(wait.age for wait in waits.values())
    kinds = {wait.kind for wait in waits.values()}
    ops = {wait.op for wait in waits.values()}
    kind: FindingKind = "order" if kinds != {"message"} else "messages" if len(ops) == 1 else "tags"
    by_call: dict[tuple[str, object], list[int]] = defaultdict(list)
    for rank, wait in waits.items():
        by_call[wait.label, view.observed.get(rank)].append(rank)
    calls = [(label, there) for (label, _), there in by_call.items()]
    parts = [f"{subject(ranks)} wait for each other for {seconds(age)}: {sentences.in_calls(view, calls)}"]
    behind = sorted(reaching(blocked, set(ranks)) - set(ranks))
    if behind:
        parts.append(f"behind them {sentences.waiting_at(view, behind)}")
    remedies: dict[str, str] = {
        "order": "make these calls in one order on all ranks",
        "mixed": "the other end of the message is missing, or comes behind the collective: make them in one order",
        "send": "let one of them receive first, or use isend and irecv, or batch_isend_irecv",
        "recv": "let one of them send: nothing is on its way to either",
        "tags": "send and receive with equal tags, or in one order",
    }
    remedy = remedies[next(iter(ops)) if kind == "messages" else "mixed" if len(kinds) > 1 else kind]
    first = waits[ranks[0]]
    places = sentences.place_texts(view, [*ranks, *behind])
    last = view.last_common(next((wait for wait in waits.values() if wait.kind == "collective"), None))
    return Finding(kind, view.job, ranks, "; ".join(parts), remedy, age, first.label, behind, last, places)


def _mismatch(
    view: JobView, group: Mapping[str, Any], blocked: Mapping[int, Collection[int]]
) -> tuple[int, Finding | None]:
    """Return the number of the earliest collective in flight, and the finding if ranks make different ones under it."""
    waits = [
        wait
        for waits in view.waits.values()
        for wait in waits
        if wait.kind == "collective" and wait.group == group["id"] and wait.seq
    ]
    seq = min((wait.seq for wait in waits), default=0)
    age = max((wait.age for wait in waits if wait.seq == seq), default=0.0)
    if not seq:
        return 0, None
    by_call: dict[str, list[int]] = defaultdict(list)
    ops: set[str] = set()
    for rank, snapshot in view.snapshots.items():
        calls = {
            (call["op"], call["call"] if call["op"] in _SAME_ARGUMENTS else call["op"])
            for call in [*snapshot["calls"], *snapshot["ended"]]
            if (call["group"], call["seq"], call["peer"]) == (group["id"], seq, None)
        }
        if calls:
            by_call[", ".join(sorted(text for _, text in calls))].append(rank)
            ops.update(op for op, _ in calls)
    if len(by_call) < 2:
        return 0, None
    most = max(by_call.values(), key=len)
    everyone = sorted(rank for there in by_call.values() for rank in there)
    ranks = [rank for rank in everyone if rank not in most or 2 * len(most) <= len(everyone)]
    number = f"collective #{seq}{of_group(group['name'])}"
    behind = sorted((reaching(blocked, set(everyone)) | set(everyone)) - set(ranks))
    parts = [f"{number} differs between the ranks for {seconds(age)}: {sentences.in_calls(view, by_call.items())}"]
    if indirect := [rank for rank in behind if rank not in everyone]:
        parts.append(f"behind them {sentences.waiting_at(view, indirect)}")
    remedy = "make these calls in one order on all ranks" if len(ops) > 1 else "give equal arguments on all ranks"
    last = view.last_common(next(wait for wait in waits if wait.seq == seq))
    places = sentences.place_texts(view, [*ranks, *behind])
    return seq, Finding("order", view.job, ranks, "; ".join(parts), remedy, age, number, behind, last, places)


def _joining_stall(view: JobView) -> Finding:
    known = sorted(report.rank for report in view.joining if report.rank >= 0)
    there = subject(known) if known else f"{len(view.joining)} processes without a rank"
    text = f"job {view.job} waits for more ranks to join; {there} {verb(view.joining, 'is', 'are')} there"
    return Finding("joining", view.job, known, text, "look at the output of the ranks that are missing")
