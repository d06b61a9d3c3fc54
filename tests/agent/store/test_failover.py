"""Which rank a client of the job's store asks next."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
from collections.abc import Iterator

import pytest

from rankmesh_agent.net.sockets import url_of
from rankmesh_agent.store import failover as module
from rankmesh_agent.store import http_client
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.commands import Get, Set
from rankmesh_agent.store.failover import AsyncJobStore, Failover, OwnerCache
from rankmesh_agent.store.memory import MemoryStore
from rankmesh_agent.store.moved import StoreMovedError
from rankmesh_agent.store.ownership import Ownership
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.errors import DistNetworkError, StoreUnresponsiveError
from rankmesh_agent.wire.schemas import Member


@pytest.fixture
def owners() -> Iterator[OwnerCache]:
    """Rank 2's of three: the owner is on another host, and so is rank 1, the first to take over."""
    members = {
        rank: Member(rank, secrets.token_hex(16), host, host, os.getpid(), [], "http://127.0.0.1:1")
        for rank, host in enumerate("abc")
    }

    def lost(*, certainly: bool = False) -> set[int]:
        return set()

    ownership = Ownership(2, members, "", Table(), lost)
    yield OwnerCache(ownership, members, lambda: False)
    ownership.close()


def test_it_follows_a_referral(owners):
    failover = Failover(owners, 0)
    failover.failed(StoreMovedError.to(1))
    assert failover.rank == owners.current == 1


def test_it_is_not_sent_back_to_a_rank_that_it_has_excluded(owners):
    """The rank that was asked may be about to exclude it, too; who is excluded may never respond."""
    owners.ownership.exclude([0])
    owners.current = 1
    failover = Failover(owners, 1)
    assert failover.failed(StoreMovedError.to(0)) > 0
    assert failover.rank == owners.current == 1


def test_ranks_without_a_copy_are_passed_over(owners):
    owners.ownership.exclude([0])
    failover = Failover(owners, 1)
    failover.failed(StoreMovedError.to(None))
    assert failover.rank == 2


def test_a_rank_without_a_copy_is_not_asked_again(owners):
    owners.ownership.exclude([0])
    failover = Failover(owners, 1)
    failover.failed(StoreMovedError.to(None))
    failover.failed(StoreMovedError.to(1))
    assert failover.rank == 2


def test_ranks_that_refer_to_each_other_are_an_error_after_some_time(owners, monkeypatch):
    monkeypatch.setattr(module, "FAILOVER_SECONDS", 0.0)
    failover = Failover(owners, 0)
    failover.failed(StoreMovedError.to(1))
    with pytest.raises(
        DistNetworkError, match=r"no rank has taken over .* within 0 s: rank 1 .* was asked last: rank 0 has"
    ) as caught:
        failover.failed(StoreMovedError.to(0))
    assert caught.value.ranks == (1,)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("command", "limit"), [(Set("k", b""), "0.2 s"), (Get("k", 0.1), "0.1 s and 0.2 s more")], ids=["set", "get"]
)
async def test_a_forwarded_request_ends_with_an_error_that_names_the_stopped_owner(
    owners, monkeypatch, command: Command, limit: str
):
    monkeypatch.setattr(module, "FORWARD_SECONDS", 0.2)
    monkeypatch.setattr(http_client, "HTTP_MARGIN_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # its kernel accepts connections
        owners.members[0] = dataclasses.replace(owners.members[0], http=url_of(stopped))
        store = AsyncJobStore(owners, MemoryStore(), "")
        with pytest.raises(
            StoreUnresponsiveError, match=rf"of rank 0 \(a, pid {os.getpid()}\), .* within {limit}\. .* Repeat"
        ) as caught:
            await store.execute(command)
        await store.close()
    assert caught.value.ranks == (0,)
