"""JSON bodies of the gateway's responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rankmesh_agent.wire.schemas import AgentEntry, Member, RankGroupInfo, RankInfo
from rankmesh_agent.wire.snapshot import ProcessView, RankSnapshot

HELD_UP_SECONDS = 10.0
"""Age from which a call that ranks are missing from is held up."""

JobState = Literal["forming", "running", "failing", "failed", "ended"]
FindingKind = Literal[
    "failed", "joining", "stopped", "ended", "silent", "order", "messages", "tags", "key", "elsewhere", "slow",
    "suspect", "agent", "group", "call", "busy",
]  # fmt: skip
Severity = Literal["failed", "warning", "note"]


@dataclass
class JobInfo:
    """Summary of a job's world in one epoch.

    Attributes:
        job: the job's name.
        epoch: counts the job's complete worlds, from 1.
        state: ``forming`` while ranks are missing; ``running``; ``failing`` when some have failed and others are live;
            when none is live, ``failed`` if some have failed, else ``ended``.
        world_size: the number of ranks of the complete world.
        ranks: the number of ranks in each state.
        since: when the world was complete, or else when the first rank joined, in seconds since 1970.
        ended: when its last rank was heard, in seconds since 1970; null while a rank is live.
    """

    job: str
    epoch: int
    state: JobState
    world_size: int
    ranks: dict[str, int]
    since: float
    ended: float | None = None


@dataclass
class GroupInFlight:
    """A call in flight: some members of a group have begun it, and not all have completed it.

    Attributes:
        job: the job it belongs to.
        epoch: the job's epoch.
        group: the group's id.
        name: the group's name.
        op: the call with its arguments, as the first member that arrived reports it.
        seq: its sequence number in the group.
        age: seconds since the first member began it.
        bytes: the most bytes of a member's arrays.
        arrived: the global ranks that are in the call, as last reported.
        missing: the global ranks that have not begun it, as last reported.
        differing: the call at the members (global rank, as text) that make another one.
        held_up: whether ranks have been missing for HELD_UP_SECONDS.
    """

    job: str
    epoch: int
    group: str
    name: str
    op: str
    seq: int
    age: float
    bytes: int
    arrived: list[int]
    missing: list[int]
    differing: dict[str, str]
    held_up: bool = False


@dataclass
class GatewayInfo:
    """The gateway: ``id`` is random for each process; ``uptime`` is in seconds."""

    id: str
    version: str
    uptime: float


@dataclass
class TotalRates:
    """Operations and bytes of all groups a second."""

    operations: float
    bytes: float


@dataclass
class RateSample:
    """The total rates ``age`` seconds ago."""

    age: float
    operations: float
    bytes: float


@dataclass
class JobStore:
    """Contents of a job's store: the number of keys, and the first names, at most 100."""

    job: str
    keys: int
    names: list[str]


@dataclass
class Finding:
    """A problem of ranks, a group or an agent, in words.

    Attributes:
        kind: found by a diagnosis, in what agents answer: ``failed``: the rank has failed; ``joining``:
            a world is not complete; ``stopped``, ``ended``, ``silent``: its agent does not answer, or left no dump;
            ``order``: ranks wait for each other in collectives, or make different ones under one number;
            ``messages``: in messages; ``tags``: in messages whose tags differ; ``key``: it waits for a key of the
            store; ``elsewhere``: it is in the user's code; ``slow``: all ranks are in the call. Found in an overview:
            ``suspect``: the rank is; ``agent``: a standalone agent is suspect or has failed; ``group``: it has failed;
            ``call``: it is held up; ``busy``: the others wait for the rank, which comes late to the operations.
        job: the job; empty for a standalone agent.
        ranks: the ranks that are the cause.
        text: the problem in a sentence.
        remedy: what to do.
        seconds: since when ranks wait, or the rank or agent was heard last; 0 if that is not known.
        call: the call that they wait in, empty if there is none.
        waiting: the ranks that wait for it, directly or not.
        last: the last collective that all members of its group have completed.
        places: the place of each rank in ``ranks`` and ``waiting`` that is known.
        young: whether the wait may be a slow step.
        name: of the group or the agent that has failed; empty for other problems.
        severity: ``note`` for what is no problem, but slow.
    """

    kind: FindingKind
    job: str
    ranks: list[int]
    text: str
    remedy: str
    seconds: float = 0.0
    call: str = ""
    waiting: list[int] = field(default_factory=list)
    last: str = ""
    places: dict[int, str] = field(default_factory=dict)
    young: bool = False
    name: str = ""
    severity: Severity = "warning"


@dataclass
class DiagnosedRank:
    """A rank, and whether its agent answers.

    Attributes:
        job, epoch, rank, host, pid: the rank.
        state: see RankInfo.
        answers: whether its agent does.
        error: the reason why it does not.
        process: state letter of the process, where the gateway or another rank is on its host and the agent does not
            answer; ``-`` if there is no such process.
    """

    job: str
    epoch: int
    rank: int
    host: str
    pid: int
    state: str
    answers: bool
    error: str
    process: str


@dataclass
class Diagnosis:
    """Why jobs are stuck.

    Attributes:
        ok: whether the agents' answers show no problem.
        time: when the agents were asked, in seconds since 1970.
        problems: all problems, the most certain first; see ``find_problems``.
        ranks: the ranks of the newest epoch of each job that have not left.
    """

    ok: bool
    time: float
    problems: list[Finding]
    ranks: list[DiagnosedRank]


@dataclass
class RankDetails(DiagnosedRank):
    """A rank as its agent describes it now.

    Attributes:
        place: where the rank is in the user's code, as in the findings; empty if that is not known.
        snapshot: its calls, its waits for keys, its stacks and its CPU time; null if its agent does not answer.
        outside: its process then, as its host sees it.
        time: when the snapshot was taken, by the gateway's clock, in seconds since 1970: the calls' ages end then.
        uncertainty: the seconds by which that may be wrong: half of the time that the agent took to answer.
    """

    place: str
    snapshot: RankSnapshot | None
    outside: ProcessView
    time: float
    uncertainty: float


@dataclass
class Straggler:
    """A rank that makes the others wait, or all ranks of a host.

    Attributes:
        job, ranks: the ranks.
        lost: share of the time that the others wait for them and for no other rank.
        last, calls: how often they came last, by more than the clocks may be wrong, of how many collectives.
        late: median of the seconds by which they came last.
        since: seconds since that began.
        why: what they do meanwhile.
        place: where the first of them is in the user's code now; empty if that is not known.
    """

    job: str
    ranks: list[int]
    lost: float
    last: int
    calls: int
    late: float
    since: float
    why: str
    place: str = ""


@dataclass
class OperationTimes:
    """The calls of one operation, with the same arguments, in a group.

    Attributes:
        group: the group's name.
        call: the operation with its arguments, as text.
        calls: how many a rank has made.
        seconds: mean seconds of a call at a rank.
        bytes: of a rank's array.
        slowest: the rank for which the others have waited the longest; -1 if they have waited for none.
        late: the seconds for which they have waited for it and for no other rank.
    """

    group: str
    call: str
    calls: int
    seconds: float
    bytes: int
    slowest: int
    late: float


@dataclass
class Timeline:
    """Waits of the ranks of a job for each other over the last seconds, and its operations.

    Attributes:
        job: the job.
        seconds: the time.
        waits: by rank, the share of each of 120 equal parts of the time, the latest last, for which it has waited for
            other ranks: until the last one has come to a collective, for a message, or for a key of the store.
        operations: those on which the ranks have spent the most time first, 50 at most.
        silent: the ranks that do not answer.
    """

    job: str
    seconds: float
    waits: dict[int, list[float]]
    operations: list[OperationTimes]
    silent: list[NoAnswer] = field(default_factory=list)


@dataclass
class NoAnswer:
    """A rank whose agent did not fulfil a request, and why."""

    rank: int
    detail: str


@dataclass
class StragglerReport:
    """The ranks that make the others wait, of each job the worst first, and the ranks that do not answer."""

    stragglers: list[Straggler]
    silent: list[NoAnswer]


@dataclass
class Overview:
    """Snapshot of the whole gateway.

    Attributes:
        time: in seconds since 1970.
        problems: all problems; why jobs are stuck is of a diagnosis of the last seconds, which is made again while
            clients stream the overview. See ``find_problems``.
        gateway, ranks, agents, groups, inflight, rates, store, jobs: see there.
    """

    time: float
    gateway: GatewayInfo
    ranks: list[RankInfo]
    agents: list[AgentEntry]
    groups: list[RankGroupInfo]
    inflight: list[GroupInFlight]
    rates: TotalRates
    store: list[JobStore]
    jobs: list[JobInfo] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)


@dataclass
class RegistrySnapshot:
    """The ranks and groups of all jobs at one moment, for ``rankmesh diagnose``."""

    ranks: list[RankInfo]
    groups: list[RankGroupInfo]


@dataclass
class WaitingProcess:
    """A process that waits for the world of a job to grow."""

    job: str
    member: Member


@dataclass
class GroupMade:
    """A group that has been created at all its members.

    Attributes:
        job: the job it belongs to.
        epoch: the job's epoch.
        id: the group's id.
        name: the group's name.
        ranks: global ranks of the members, by group rank.
    """

    job: str
    epoch: int
    id: str
    name: str
    ranks: list[int]


@dataclass
class FanOut:
    """Outcome of a request to the agents of a group's members.

    Attributes:
        id: the group's id.
        name: the group's name.
        asked: the members to whose agents the request was sent: all that have not left.
        answered: those that fulfilled it.
        failed: the others.
    """

    id: str
    name: str
    asked: list[int]
    answered: list[int]
    failed: list[NoAnswer]


@dataclass
class GroupChanged:
    """A group that has replaced another: the new one, and the outcome of ending the old one."""

    made: GroupMade
    ended: FanOut


@dataclass
class DashboardCode:
    """A code that opens the dashboard once.

    Attributes:
        code: the code.
        expires_in: seconds for which it is valid.
    """

    code: str
    expires_in: int


@dataclass
class DashboardSession:
    """A session of the dashboard.

    Attributes:
        token: bearer token of its requests, which have the role ``read``.
        expires_in: seconds for which it is valid.
    """

    token: str
    expires_in: int
