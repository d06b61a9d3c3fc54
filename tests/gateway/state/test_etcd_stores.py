"""The jobs' stores in a real etcd: one gateway at a time, limits, and an etcd that is away, or stops."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.certificates import tls_of
from support.etcd import Etcd
from support.processes import free_port

from rankmesh_agent.store.commands import Add, MultiSet, QueuePop, QueuePush, Set
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.errors import DistStoreError
from rankmesh_agent.wire.store_frames import RequestId
from rankmesh_gateway.state import etcd_stores as module
from rankmesh_gateway.state.etcd_stores import EtcdStores
from rankmesh_gateway.state.store_backend import OutcomeUnknownError
from rankmesh_gateway.state.store_log import StoreLog

STORE = "5" * 32


@pytest.fixture
def gateway() -> Iterator[Callable[[str], Table]]:
    """Makes the table that the next gateway has of a store."""
    backends: list[EtcdStores] = []

    def make(url: str) -> Table:
        backends.append(EtcdStores(url))
        table = Table()
        table.log = StoreLog(backends[-1], STORE, "job", table, backends[-1].load().get(STORE))
        return table

    yield make
    for backend in backends:
        backend.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Etcd]:
    """An etcd of one test, which may stop it."""
    server = Etcd(tmp_path)
    yield server
    server.stop()


@pytest.mark.parametrize(
    "url", ["http://h:1/p", "etcd:///p", "etcd://h:x", "etcd://a,,b", "etcd://user:word@h", "h:2379"]
)
def test_a_url_of_another_form(url):
    with pytest.raises(ValueError, match=r"etcd://HOST:PORT\[,HOST:PORT...\]\[/PREFIX\]|[Pp]ort could not"):
        EtcdStores(url)


def test_more_keys_than_a_page(etcd, gateway):
    url = etcd.url()
    before = gateway(url)
    for number in range(0, 300, 100):
        MultiSet(tuple((f"k{each}", b"%d" % each) for each in range(number, number + 100))).apply(before)
    for number in range(3):
        before.push("q/ü", b"%d" % number)
    assert QueuePop("q/ü").try_execute(before) == (b"0",)
    after = gateway(url)
    assert after.contents() == before.contents()
    after.push("q/ü", b"3")
    assert [after.pop_one("q/ü") for _ in range(4)] == [b"1", b"2", b"3", None]


def test_prefixes_are_apart(etcd, gateway):
    first, second = gateway(etcd.url()), gateway(etcd.url())
    for table in (first, second, first, second):
        Add("n").apply(table)
    assert (first.value("n"), second.value("n")) == (b"2", b"2")


def test_removed(etcd, gateway):
    url = etcd.url()
    table = gateway(url)
    Set("k", b"v").apply(table)
    table.log._backend.remove(STORE)
    assert gateway(url).names() == []


def test_a_gateway_that_is_replaced_writes_nothing_any_more(etcd, gateway):
    url = etcd.url()
    first = gateway(url)
    Set("k", b"first").apply(first)
    second = gateway(url)
    for command in (Set("k", b"late"), MultiSet((("k", b"late"), ("l", b""))), QueuePush("q", b"late")):
        with pytest.raises(DistStoreError, match=r"another gateway has taken over .* so nothing has changed"):
            command.try_execute(first)
    assert first.contents() == ({"k": b"first"}, {})
    Set("k", b"second").apply(second)
    assert gateway(url).contents() == ({"k": b"second"}, {})


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (Set("k", b"x" * (2 << 20)), "large"),
        (MultiSet(tuple((str(number), b"") for number in range(200))), "too many operations"),
    ],
    ids=["bytes", "keys"],
)
def test_what_etcd_refuses(etcd, gateway, command, reason):
    url = etcd.url()
    table = gateway(url)
    with pytest.raises(DistStoreError, match=f"refuses .* nothing has changed: .*{reason}.* 1.5 MiB and 128 keys"):
        command.apply(table)
    Set("k", b"v").apply(table)
    assert table.contents() == gateway(url).contents() == ({"k": b"v"}, {})


@pytest.mark.slow
def test_stopped_and_started_again(own, gateway, monkeypatch):
    url = own.url()
    table = gateway(url)
    Set("k", b"before").apply(table)
    own.stop()
    monkeypatch.setattr(module, "_SECONDS", 1.0)
    monkeypatch.setattr(module, "_SHORT_SECONDS", 0.2)
    began = time.monotonic()
    with pytest.raises(DistStoreError, match=f"etcd at {url} (cannot be reached|does not answer)"):
        MultiSet((("k", b"after"), ("l", b"after"))).apply(table)
    with pytest.raises(DistStoreError, match=r"cannot be reached, so nothing has changed: .*refused"):
        Add("n").apply(table)
    assert time.monotonic() - began < 3
    assert table.contents() == ({"k": b"before"}, {})
    with pytest.raises(DistStoreError, match="cannot be reached"):
        gateway(url)
    monkeypatch.undo()
    own.start()
    assert Add("n").apply(table) == 1
    assert table.contents() == gateway(url).contents() == ({"k": b"before", "n": b"1"}, {})


@pytest.mark.slow
def test_a_change_without_an_answer_is_undone(own, gateway, monkeypatch):
    """etcd has received it, and makes it when it goes on, after it has failed."""
    url = own.url()
    table = gateway(url)
    Set("k", b"before").apply(table)
    table.push("q", b"first")
    table.push("q", b"second")
    for command in (MultiSet((("k", b"lost"), ("l", b"lost"))), QueuePop("q"), QueuePush("q", b"lost")):
        own.process.send_signal(signal.SIGSTOP)
        table.log.request_id = RequestId(b"n" * 64, 1)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_SECONDS", 0.3)
            with pytest.raises(OutcomeUnknownError, match=r"does not answer: .*timed out"):
                command.try_execute(table)
        own.process.send_signal(signal.SIGCONT)
        assert table.contents() == ({"k": b"before"}, {"q": [b"first", b"second"]})
        time.sleep(0.5)
        assert table.log._backend._rows()[STORE] != {}, "it goes on"
        table.log.request_id = None
        Set("k", b"before").apply(table)
    after = gateway(url)
    assert after.contents() == table.contents()
    assert after.replies.find(RequestId(b"n" * 64, 1)) is None


@pytest.mark.slow
def test_a_connection_that_etcd_has_closed_does_not_matter(own, gateway):
    table = gateway(own.url())
    Set("k", b"before").apply(table)
    own.stop(signal.SIGTERM)
    own.start()
    Set("k", b"after").apply(table)
    assert table.value("k") == b"after"


def test_one_member_of_several_is_enough(etcd, gateway):
    url = etcd.url().replace("etcd://", f"etcd://127.0.0.1:{free_port()},")
    Set("k", b"v").apply(gateway(url))
    assert gateway(url).value("k") == b"v"


def test_over_tls(tmp_path, gateway, monkeypatch):
    files = tls_of(tmp_path, "127.0.0.1")
    server = Etcd(tmp_path, (Path(files["RANKMESH_TLS_CERT"]), Path(files["RANKMESH_TLS_KEY"])))
    url = server.url().replace("etcd:", "etcds:")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_SECONDS", 0.5)
        with pytest.raises(DistStoreError, match="certificate verify failed"):
            gateway(url)
    monkeypatch.setenv("SSL_CERT_FILE", files["RANKMESH_TLS_CA"])
    Set("k", b"v").apply(gateway(url))
    assert gateway(url).value("k") == b"v"
    server.stop()
