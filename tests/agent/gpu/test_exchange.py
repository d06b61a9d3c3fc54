"""Ids of NCCL's communicators as messages of a group."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.processes import Me, on_ranks, wait_until

import rankmesh as dist
from rankmesh._session.session import require_session
from rankmesh_agent.gpu import exchange
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.object_records import RECORD_TAG

pytestmark = pytest.mark.processes


@on_ranks(2)
def test_a_receive_of_objects_from_any_rank_takes_no_id(me: Me) -> None:
    me.init()
    host, peer = require_session().agent.world, 1 - me.rank
    if me.rank == 0:
        me.wait_for("posted")
        exchange.send(host, peer, b"id", 1, Deadline(20))
        assert exchange.swap(host, peer, b"zero", 8, Deadline(20)) == b"one"
        dist.send_object_list(["object", np.arange(3000)], dst=1)
    else:
        objects = [None, None]
        record = ThreadPoolExecutor().submit(dist.recv_object_list, objects)
        wait_until(lambda: host.matcher.receives.first(peer, RECORD_TAG), "the receive")
        me.mark("posted")
        assert exchange.receive(host, peer, 2, 1, Deadline(20)) == b"id"
        assert exchange.swap(host, peer, b"one", 8, Deadline(20)) == b"zero"
        assert record.result(20) == 0
        assert objects[0] == "object"
    dist.destroy_process_group()
