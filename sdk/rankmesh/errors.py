"""All errors of RankMesh. ``rankmesh`` itself has those of torch.distributed, and those that a training loop meets."""

from rankmesh_agent.wire.errors import AddressInUseError as AddressInUseError
from rankmesh_agent.wire.errors import AgentTakenError as AgentTakenError
from rankmesh_agent.wire.errors import AuthenticationError as AuthenticationError
from rankmesh_agent.wire.errors import CollectiveMismatchError as CollectiveMismatchError
from rankmesh_agent.wire.errors import CollectiveTimeoutError as CollectiveTimeoutError
from rankmesh_agent.wire.errors import DistBackendError as DistBackendError
from rankmesh_agent.wire.errors import DistError as DistError
from rankmesh_agent.wire.errors import DistNetworkError as DistNetworkError
from rankmesh_agent.wire.errors import DistStoreError as DistStoreError
from rankmesh_agent.wire.errors import ForbiddenJobError as ForbiddenJobError
from rankmesh_agent.wire.errors import GatewayUnreachableError as GatewayUnreachableError
from rankmesh_agent.wire.errors import GroupAbortedError as GroupAbortedError
from rankmesh_agent.wire.errors import IdempotencyKeyReusedError as IdempotencyKeyReusedError
from rankmesh_agent.wire.errors import InvalidKeyError as InvalidKeyError
from rankmesh_agent.wire.errors import InvalidValueError as InvalidValueError
from rankmesh_agent.wire.errors import JobEndedError as JobEndedError
from rankmesh_agent.wire.errors import JoinTimeoutError as JoinTimeoutError
from rankmesh_agent.wire.errors import KeyNotFoundError as KeyNotFoundError
from rankmesh_agent.wire.errors import LeaseEndedError as LeaseEndedError
from rankmesh_agent.wire.errors import NoAgentsError as NoAgentsError
from rankmesh_agent.wire.errors import NoFreeAgentError as NoFreeAgentError
from rankmesh_agent.wire.errors import NotANumberError as NotANumberError
from rankmesh_agent.wire.errors import NotLeasedError as NotLeasedError
from rankmesh_agent.wire.errors import PreconditionFailedError as PreconditionFailedError
from rankmesh_agent.wire.errors import ProtocolError as ProtocolError
from rankmesh_agent.wire.errors import QueueEmptyError as QueueEmptyError
from rankmesh_agent.wire.errors import RankFailedError as RankFailedError
from rankmesh_agent.wire.errors import RankTakenError as RankTakenError
from rankmesh_agent.wire.errors import StoreFullError as StoreFullError
from rankmesh_agent.wire.errors import StoreLostError as StoreLostError
from rankmesh_agent.wire.errors import StoreTimeoutError as StoreTimeoutError
from rankmesh_agent.wire.errors import StoreUnresponsiveError as StoreUnresponsiveError
from rankmesh_agent.wire.errors import UnsupportedStoreError as UnsupportedStoreError
from rankmesh_agent.wire.errors import WorldSizeMismatchError as WorldSizeMismatchError

for _kind in list(globals().values()):
    if isinstance(_kind, type):
        _kind.__module__ = __name__
