"""The jobs' stores at a gateway: whose they are, how long they last, and what the file keeps of them."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankmesh_agent.store.codec import decode_result, encode_result
from rankmesh_agent.store.commands import Add, Append, CompareSet, Delete, MultiSet, QueuePop, QueuePush, Set
from rankmesh_agent.store.table import Quota, Table
from rankmesh_agent.wire.credentials import Credentials, for_job
from rankmesh_agent.wire.errors import DistStoreError, StoreFullError
from rankmesh_agent.wire.schemas import FAILED_SECONDS, NO_NODE, STARTING, LauncherHeartbeat
from rankmesh_agent.wire.store_frames import RequestId
from rankmesh_gateway.state import job_stores
from rankmesh_gateway.state.etcd_stores import EtcdStores
from rankmesh_gateway.state.job_stores import SHOWN_NAMES, JobStores
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.registry_file import RegistryFile
from rankmesh_gateway.state.store_log import StoreLog


def form(registry: Registry, ask: Any, job: str = "job", size: int = 2, life: int = 1) -> bytes:
    """Complete a world; return the id of its store."""
    replies = [registry.join(ask.join(rank, size, job=job, life=life)) for rank in range(size)]
    (store,) = {reply.result(0).store for reply in replies}
    return bytes.fromhex(store)


@pytest.fixture
def stores(registry) -> JobStores:
    return JobStores(registry, "secret")


class TestWhose:
    def test_each_world_has_one_that_is_empty(self, stores, registry, ask):
        first = form(registry, ask)
        Set("k", b"v").apply(stores.find(first))
        for rank in range(2):
            registry.leave(ask.leave(rank))
        second = form(registry, ask, life=2)
        assert second != first
        assert stores.find(second).names() == []
        assert stores.find(form(registry, ask, "other")) is not stores.find(second)

    def test_none_that_the_registry_does_not_know(self, stores):
        assert stores.find(os.urandom(16)) is None

    def test_its_clients_have_the_credential_of_the_job(self, stores, registry, ask):
        mine, others = form(registry, ask), form(registry, ask, "other")
        assert stores.credentials(mine).of_own_job == for_job("secret", "job")
        assert stores.credentials(others).of_own_job == for_job("secret", "other")
        assert stores.credentials(os.urandom(16)) == Credentials("secret")

    def test_a_larger_world_has_that_of_the_world_that_grew(self, stores, registry, ask):
        store = form(registry, ask)
        registry.join(ask.waiting(7))
        replies = [registry.join(ask.growth(rank, 3)) for rank in range(2)]
        assert {bytes.fromhex(each.result(0).store) for each in replies} == {store}

    def test_a_quota_for_each(self, registry, ask):
        table = JobStores(registry, quota=Quota(1, 100)).find(form(registry, ask))
        Set("a", b"").apply(table)
        with pytest.raises(StoreFullError, match="RANKMESH_STORE_KEYS"):
            Set("b", b"").apply(table)


class TestHowLong:
    def test_that_of_torchruns_as_long_as_one_lives(self, stores, registry, clock):
        beat = LauncherHeartbeat("job", NO_NODE, 2, "n0", STARTING, "waiting", 1, 1, torchrun=True)
        store = bytes.fromhex(registry.launchers.heartbeat(beat).store)
        table = stores.find(store)
        assert stores.credentials(store).of_own_job == for_job("secret", "job")
        clock.advance(FAILED_SECONDS - 1)
        stores.drop_unused()
        assert stores.find(store) is table
        clock.advance(1)
        stores.drop_unused()
        assert stores.find(store) is None

    def test_until_the_last_rank_has_left(self, stores, registry, ask):
        store = form(registry, ask)
        table = stores.find(store)
        wait = table.watch(["never"], dict)
        registry.leave(ask.leave(0))
        stores.drop_unused()
        assert stores.find(store) is table
        registry.leave(ask.leave(1))
        stores.drop_unused()
        assert stores.find(store) is None
        assert wait.cancelled()

    def test_ranks_that_a_gateway_with_a_file_has_yet_to_hear_from_keep_theirs(
        self, path, clock, ask, monkeypatch, reopened
    ):
        """It was killed before it wrote that the world is complete, but after a value was acknowledged."""
        file = RegistryFile(path)
        registry = Registry(clock)
        store = form(registry, ask)
        Set("k", b"v").apply(JobStores(registry, backend=file.stores).find(store))
        file.close()
        registry, stores = reopened()
        stores.drop_unused()
        assert stores.find(store).value("k") == b"v", "a client comes before the first heartbeat"
        stores.drop_unused()
        assert stores.find(store).value("k") == b"v"
        registry.heartbeat(ask.heartbeat(0))
        monkeypatch.setattr(job_stores, "_SETTLED_SECONDS", 0.0)
        stores.drop_unused()
        assert stores.find(store).value("k") == b"v", "a rank lives, of a world whose store is not known"
        registry.leave(ask.leave(0))
        stores.drop_unused()
        assert stores.find(store) is None
        assert reopened()[1].find(store) is None

    def test_an_empty_one_is_there_again(self, path, clock, ask, reopened):
        file = RegistryFile(path)
        store = form(registry := Registry(clock), ask)
        assert JobStores(registry, backend=file.stores).find(store).names() == []
        file.close()
        assert reopened()[1].find(store).names() == []


class TestShown:
    def test_the_number_of_keys_and_the_first_names(self, stores, registry, ask):
        table = stores.find(form(registry, ask))
        MultiSet(tuple((f"{number:03d}", b"") for number in range(300))).apply(table)
        table.count_call("get")
        assert [(each.job, each.keys) for each in stores.contents()] == [("job", 300)]
        assert stores.contents("job")[0].names == [f"{number:03d}" for number in range(SHOWN_NAMES)]
        assert stores.contents("other") == []
        assert stores.stats()["job"] == ({"get": 1}, 300)

    async def test_metrics_and_overview_have_them(self, client, registry, ask, anyio_backend_name):
        form(registry, ask)
        assert (await client.get("/v1/overview")).json()["store"] == []
        assert "rankmesh_store_keys" in (await client.get("/metrics")).text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def reopened(path, clock) -> Iterator[Callable[[], tuple[Registry, JobStores]]]:
    """Makes the registry and the stores of the next gateway with the file."""
    files: list[RegistryFile] = []

    def make() -> tuple[Registry, JobStores]:
        while files:
            files.pop().close()
        files.append(RegistryFile(path))
        registry = Registry(clock)
        files[0].load(registry)
        return registry, JobStores(registry, backend=files[0].stores)

    yield make
    for file in files:
        file.close()


NAME = b"n" * 64


class Kept:
    """A store in a backend.

    Args:
        path: of the state file.
        etcd: URL of a prefix in etcd, in place of the file.
    """

    def __init__(self, registry: Registry, ask: Any, path: Path, etcd: str = "") -> None:
        self._path, self._etcd = path, etcd
        self.file = None if etcd else RegistryFile(path)
        self.backend = EtcdStores(etcd) if self.file is None else self.file.stores
        self.store = form(registry, ask)
        self.table = JobStores(registry, backend=self.backend).find(self.store)

    def again(self) -> Table:
        """What another gateway reads of the store, while the first one has it: as after kill -9."""
        if self.file is None:
            rows = self.backend._rows()
        else:
            copy = self._path.with_name(os.urandom(8).hex())
            for suffix in ("", "-wal"):
                copy.with_name(copy.name + suffix).write_bytes(
                    self._path.with_name(self._path.name + suffix).read_bytes()
                )
            file = RegistryFile(copy)
            rows = file.stores.load()
            file.close()
        table = Table()
        table.log = StoreLog(self.backend, self.store.hex(), "job", table, rows.get(self.store.hex()))
        return table

    def close(self) -> None:
        (self.file or self.backend).close()


class TestBackends:
    @pytest.fixture(params=["sqlite", "etcd"])
    def kept(self, request, path, registry, ask) -> Iterator[Kept]:
        url = request.getfixturevalue("etcd").url() if request.param == "etcd" else ""
        found = Kept(registry, ask, path, url)
        yield found
        found.close()

    @pytest.mark.parametrize(
        ("command", "result"),
        [
            (Set("k", bytes(range(256))), None),
            (Set("zwölf\0k", b""), None),
            (MultiSet((("a", b"1"), ("b", b"2"))), None),
            (Add("n", 5), 12),
            (Append("n", b"1"), None),
            (Delete("n"), True),
            (CompareSet("n", b"7", b"8"), b"8"),
            (QueuePush("q", b"third"), None),
            (QueuePop("q"), b"first"),
        ],
        ids=lambda each: getattr(each, "name", ""),
    )
    def test_a_change_is_there_before_it_is_acknowledged_and_so_is_the_reply(self, kept, command, result):
        table = kept.table
        MultiSet((("n", b"7"),)).apply(table)
        for value in (b"first", b"second"):
            QueuePush("q", value).apply(table)
        table.log.request_id = request = RequestId(NAME, 3)
        assert command.try_execute(table) == (result,)
        copy = kept.again()
        assert copy.contents() == table.contents()
        assert decode_result(command, copy.replies.find(request)) == result

    def test_a_value_for_a_client_that_waits_is_in_no_queue_and_returns_to_its_head(self, kept):
        table = kept.table
        table.log.request_id = popping = RequestId(NAME, 1)
        waiting = table.pop("q")
        table.log.request_id = RequestId(b"m" * 64, 2)
        table.push("q", b"v")
        table.log.request_id = None
        assert waiting.result(0) == b"v"
        assert kept.again().contents() == ({}, {})
        assert kept.again().replies.find(popping) == encode_result(0, b"v")
        table.push("q", b"next")
        table.log.request_id = popping
        QueuePop("q").undo(table, b"v")
        assert kept.again().contents() == ({}, {"q": [b"v", b"next"]})
        assert kept.again().replies.find(popping) is None, "the client has not got it"


class TestFile:
    def test_what_cannot_be_written_is_not_changed(self, path, registry, ask):
        kept = Kept(registry, ask, path)
        table = kept.table
        Set("k", b"before").apply(table)
        table.push("q", b"v")
        table.log.request_id = RequestId(NAME, 1)
        waiting = table.pop("other")
        kept.backend._database.execute("PRAGMA query_only = 1")
        for command in (Set("k", b"after"), QueuePush("q", b"w"), QueuePop("q"), QueuePush("other", b"v")):
            with pytest.raises(DistStoreError, match="cannot write the file of its state, so nothing has changed"):
                command.try_execute(table)
        assert table.contents() == ({"k": b"before"}, {"q": [b"v"]})
        assert isinstance(waiting.exception(0), DistStoreError)
        kept.backend._database.execute("PRAGMA query_only = 0")
        assert Set("k", b"after").try_execute(table) == (None,)
        kept.close()

    def test_a_file_of_version_0_2_gets_the_tables(self, path, reopened):
        RegistryFile(path).close()
        with sqlite3.connect(path) as database:
            database.execute("DROP TABLE store")
            database.execute("PRAGMA user_version = 1")
        database.close()
        assert reopened()[1].contents() == []
