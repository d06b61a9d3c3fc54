"""Diagnoses of the jobs at a gateway: it asks the agents when a client asks for one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace

from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.hello import Service
from rankmesh_agent.wire.snapshot import WATCH_SECONDS, RankSnapshot, RankWaits
from rankmesh_gateway.diagnosis.frames import location_of
from rankmesh_gateway.diagnosis.reports import RankReport, newest_ranks
from rankmesh_gateway.diagnosis.snapshots import add_snapshots
from rankmesh_gateway.diagnosis.stalls import find_stalls
from rankmesh_gateway.schemas import DiagnosedRank, Diagnosis, Finding, NoAnswer, RankDetails, StragglerReport, Timeline
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.stragglers.lateness import find_stragglers, slow_links
from rankmesh_gateway.stragglers.timeline import timeline_of

PATIENCE_SECONDS = 1.0
"""Time in which an agent must answer."""
_LIMIT = 3
"""Times that in which all of them must."""
_MIN_AGE_SECONDS = 2.0
"""Age up to which a diagnosis is given to another client."""
_AGE_PER_RANK_SECONDS = 0.02
"""The same, for each rank: asking one takes about a millisecond of the gateway's process."""
_STALE_SECONDS = 5.0
"""Time after which a diagnosis that was not made anew is forgotten."""


class RankNotFoundError(DistNetworkError):
    """No rank, or one of several jobs, has that number."""

    code = "rank-not-found"
    status = 404


class DiagnosisService:
    """Diagnoses the jobs of a registry, for the server's event loop: threads ask the agents; ``here``: a host id."""

    def __init__(self, registry: Registry, token: str, here: str) -> None:
        self._registry = registry
        self._token = token
        self._here = here
        self._latest: asyncio.Task[Diagnosis] | None = None
        self._known: Diagnosis | None = None
        self._expires_at = float("-inf")

    def known(self) -> list[Finding]:
        """Return what the last diagnosis found; nothing if it is old."""
        if self._known is None or time.monotonic() >= self._expires_at + _STALE_SECONDS:
            return []
        return self._known.problems

    def refresh_soon(self) -> asyncio.Task[Diagnosis]:
        """Begin a diagnosis, unless there is a recent one; return the latest."""
        if self._latest is None or (self._latest.done() and time.monotonic() >= self._expires_at):
            self._latest = asyncio.ensure_future(self._diagnose(PATIENCE_SECONDS))
        return self._latest

    async def diagnose(self, job: str | None = None, patience: float | None = None) -> Diagnosis:
        """Return what stalls one job or all; ``patience``: seconds for an agent's answer; None: a recent diagnosis."""
        if patience is not None and (self._latest is None or self._latest.done()):
            self._latest = asyncio.ensure_future(self._diagnose(patience))
        found = await asyncio.shield(self.refresh_soon())
        problems = [each for each in found.problems if job in (None, each.job)]
        ranks = [each for each in found.ranks if job in (None, each.job)]
        return Diagnosis(not problems, found.time, problems, ranks)

    async def details(self, rank: int, job: str | None = None) -> RankDetails:
        """Return what the agent of a rank describes; RankNotFoundError if there is none, or several without a job."""
        found = newest_ranks(self._registry.ranks(job), self._here, [rank])
        if len(found) != 1:
            jobs = ", ".join(repr(each.job) for each in found[:20])
            which = "" if job is None else f" of job {job!r}"
            raise RankNotFoundError(
                f"there is a rank {rank} in each of the jobs {jobs}: give one with ?job="
                if found
                else f"there is no rank {rank}{which} here: GET /v1/ranks lists the ranks"
            )
        return (await self._details(found, PATIENCE_SECONDS))[0]

    async def snapshots(
        self, job: str | None, ranks: Collection[int], patience: float, *, records: bool = False
    ) -> list[RankDetails]:
        """Return what the agents of some ranks, or all, describe; ``records``: with the flight recorders' calls."""
        service = Service.RECORDS if records else Service.SNAPSHOT
        return await self._details(newest_ranks(self._registry.ranks(job), self._here, ranks), patience, service)

    async def stragglers(
        self, job: str | None, seconds: float, patience: float, *, links: bool = False
    ) -> StragglerReport:
        """Return which ranks of one job or of all make the others wait, by the calls of the last seconds, and why.

        Args:
            job: the job; None for all.
            seconds: see there.
            patience: seconds in which an agent must answer.
            links: whether to watch for slow links, for WATCH_SECONDS, if no rank is late.
        """
        by_job, silent = await self._records(job, patience)
        usage = {name: self._registry.usage(name) for name in by_job}
        found = await asyncio.to_thread(
            lambda: [each for name, ranks in by_job.items() for each in find_stragglers(ranks, usage[name], seconds)]
        )
        for name in by_job.keys() - {each.job for each in found} if links else ():
            found += slow_links(name, await asyncio.to_thread(self._waits, name, patience), usage[name])
        return StragglerReport(found, [no for of_job in silent.values() for no in of_job])

    async def timelines(self, job: str | None, seconds: float, patience: float) -> list[Timeline]:
        """Return what the ranks of one job or of each have spent the last seconds on; see ``stragglers``."""
        by_job, silent = await self._records(job, patience)
        found = await asyncio.to_thread(lambda: [timeline_of(ranks, seconds) for ranks in by_job.values()])
        return [replace(each, silent=silent.get(each.job, [])) for each in found]

    async def _records(
        self, job: str | None, patience: float
    ) -> tuple[dict[str, list[RankDetails]], dict[str, list[NoAnswer]]]:
        """Return the ranks that answer, with the calls that their flight recorders keep, and the others, by job."""
        answers, silent = defaultdict[str, list[RankDetails]](list), defaultdict[str, list[NoAnswer]](list)
        for each in await self.snapshots(job, (), patience, records=True):
            if each.snapshot is None:
                silent[each.job].append(NoAnswer(each.rank, each.error))
            else:
                answers[each.job].append(each)
        return answers, silent

    def _waits(self, job: str, patience: float) -> dict[int, RankWaits]:
        """Return the ranks that each rank of a job waits for, of those that answer."""
        reports = newest_ranks(self._registry.ranks(job), self._here)
        add_snapshots(reports, self._token, patience + WATCH_SECONDS, service=Service.WAITS)
        found = {}
        for report in reports:
            with contextlib.suppress(TypeError):
                found[report.rank] = json_text.convert(RankWaits, report.snapshot)
        return found

    async def _details(
        self, reports: Sequence[RankReport], patience: float, service: Service = Service.SNAPSHOT
    ) -> list[RankDetails]:
        snapshots = await asyncio.to_thread(self._ask, reports, patience, service)
        return [
            RankDetails(
                **vars(_diagnosed(report)),
                place=_place(report),
                snapshot=snapshot,
                outside=report.outside,
                time=(report.asked + report.answered) / 2,
                uncertainty=(report.answered - report.asked) / 2,
            )
            for report, snapshot in zip(reports, snapshots, strict=True)
        ]

    async def _diagnose(self, patience: float) -> Diagnosis:
        age = _MIN_AGE_SECONDS
        try:
            found = self._known = await asyncio.to_thread(self._find, patience)
            age = max(age, _AGE_PER_RANK_SECONDS * len(found.ranks))
            return found
        finally:
            self._expires_at = time.monotonic() + age

    def _find(self, patience: float) -> Diagnosis:
        at = time.time()
        reports = newest_ranks(self._registry.ranks(), self._here)
        groups = [asdict(group) for group in self._registry.groups()]
        self._ask(reports, patience)
        problems = find_stalls(reports, groups)
        return Diagnosis(not problems, at, problems, [_diagnosed(report) for report in reports])

    def _ask(
        self, reports: Sequence[RankReport], patience: float, service: Service = Service.SNAPSHOT
    ) -> list[RankSnapshot | None]:
        """Add the snapshots to reports, and return them."""
        everyone = newest_ranks(self._registry.ranks(), self._here)
        add_snapshots(reports, self._token, patience, _LIMIT * patience, everyone, service)
        return [_read(report) for report in reports]


def _read(report: RankReport) -> RankSnapshot | None:
    """Return a report's snapshot; remove it if it has another form."""
    if report.snapshot is None:
        return None
    try:
        return json_text.convert(RankSnapshot, report.snapshot)
    except TypeError:
        report.snapshot = None
        report.error = "its agent answers in a form that this gateway does not know: their versions differ"
        return None


def _place(report: RankReport) -> str:
    if report.snapshot is None or report.snapshot["attached"]:
        return ""
    place = location_of(report.snapshot["stacks"], waits=bool(report.snapshot["calls"]))
    return "" if place is None else str(place)


def _diagnosed(report: RankReport) -> DiagnosedRank:
    answers = report.snapshot is not None
    process = "" if answers else report.outside.state
    place = report.job, report.epoch, report.rank, report.host, report.pid
    return DiagnosedRank(*place, report.state, answers, report.error, process)
