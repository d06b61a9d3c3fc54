"""JSON bodies of the HTTP interfaces, as dataclasses: servers validate them, clients build them."""

from rankmesh_agent.wire.schemas.groups import *
from rankmesh_agent.wire.schemas.hosts import *
from rankmesh_agent.wire.schemas.job import *
from rankmesh_agent.wire.schemas.launchers import *
from rankmesh_agent.wire.schemas.leases import *
from rankmesh_agent.wire.schemas.probe import *
from rankmesh_agent.wire.schemas.problem import *
from rankmesh_agent.wire.schemas.store import *

MAX_BODY_BYTES = 64 << 20
"""Largest request body unless an application has another limit."""
