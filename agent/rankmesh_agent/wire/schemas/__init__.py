"""JSON bodies of the HTTP interfaces, as dataclasses: servers validate them, clients build them."""

from rankmesh_agent.wire.schemas.groups import (
    MAX_IN_FLIGHT,
    FlightRecord,
    FlightState,
    FrameOrigin,
    GroupInfo,
    GroupRequest,
    InFlight,
    RankGroupInfo,
    StackFrame,
    ThreadStack,
)
from rankmesh_agent.wire.schemas.hosts import HostTable, Process
from rankmesh_agent.wire.schemas.job import (
    FAILED_SECONDS,
    HEARTBEAT_SECONDS,
    LISTED_MEMBERS,
    LISTED_RANKS,
    LONG_POLL_SECONDS,
    NO_HEARTBEAT,
    SUSPECT_SECONDS,
    UNASSIGNED,
    AgentHealth,
    AgentInfo,
    Done,
    EpochRequest,
    GatewayHealth,
    GrowingWorld,
    Heartbeat,
    HeartbeatReply,
    JoinReply,
    JoinRequest,
    Leave,
    LostRank,
    Member,
    MembersRequest,
    RankInfo,
    RankState,
    failed_seconds,
    suspect_seconds,
)
from rankmesh_agent.wire.schemas.launchers import (
    LAUNCHER_SECONDS,
    NO_NODE,
    STARTING,
    LauncherHeartbeat,
    LauncherReply,
    LauncherState,
)
from rankmesh_agent.wire.schemas.leases import (
    MAX_LEASES,
    OFFER_SECONDS,
    AgentEntry,
    AgentHeartbeat,
    AgentLeave,
    AgentState,
    Lease,
    LeaseOffer,
    LeaseRequest,
    LeaseState,
    LeaseTerms,
)
from rankmesh_agent.wire.schemas.probe import (
    MAX_PROBE_BYTES,
    MAX_PROBE_SECONDS,
    HostReport,
    ProbeReply,
    ProbeRequest,
    ProbeStage,
)
from rankmesh_agent.wire.schemas.problem import Problem
from rankmesh_agent.wire.schemas.store import (
    KEY_SIZE,
    MAX_KEY_BYTES,
    StoreAdd,
    StoreCompareSet,
    StoreFound,
    StoreHealth,
    StoreKey,
    StoreKeys,
    StoreNumber,
    StorePop,
    StoreQueue,
    StoreValues,
    StoreWait,
)

MAX_BODY_BYTES = 64 << 20
"""Largest request body unless an application has another limit."""
