"""TLS: who is refused, in both directions, and what runs inside it."""

from __future__ import annotations

import contextlib
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.certificates import EXPIRED, in_environment, required, tls_of
from support.connecting import dial
from support.hosting import Cluster
from support.me import GATEWAY
from support.processes import Me, Ranks

import rankmesh as dist
from rankmesh_agent.net import peer_credentials, tls
from rankmesh_agent.net.http_client import HttpClient, HttpResponse, NoResponseError
from rankmesh_agent.transports.tcp import TcpListener, TcpTransport
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError
from rankmesh_gateway.diagnosis.snapshots import fetch_snapshot

SECONDS = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of another authority."""
    return tmp_path_factory.mktemp("others")


@contextlib.contextmanager
def served(variables: dict[str, str]) -> Iterator[dist.TCPStore]:
    """A server of HTTP and of the store's binary protocol."""
    with in_environment(variables):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        yield store
    finally:
        store.close()


def get(url: str, variables: dict[str, str]) -> HttpResponse:
    with in_environment(variables), contextlib.closing(HttpClient(variables.get("RANKMESH_TOKEN", ""))) as client:
        return client.request("GET", f"{url}/openapi.json", timeout=SECONDS)


def client_of(store: dist.TCPStore, variables: dict[str, str]) -> None:
    """Connect to a store over its binary protocol."""
    with in_environment(variables):
        dist.TCPStore("127.0.0.1", store.port, timeout=5.0).close()  # tries again for so long


def test_http_and_the_store_run_inside_tls(folder):
    variables = tls_of(folder)
    with served(variables) as master, in_environment(variables):
        assert get(f"https://127.0.0.1:{master.port}", variables).status == 200
        client = dist.TCPStore("localhost", master.port)
        try:
            value = np.random.default_rng(1).bytes(3 << 20)
            client.set("key", value)
            assert client.get("key") == value
        finally:
            client.close()


@pytest.mark.parametrize("mutual", [True, False], ids=["with a CA", "with the system's"])
def test_a_certificate_of_another_authority_is_refused(folder, others, mutual):
    there, here = tls_of(others), tls_of(folder)
    if not mutual:
        del there["RANKMESH_TLS_CA"], here["RANKMESH_TLS_CA"]
    with served(there) as master:
        with pytest.raises(AuthenticationError, match="no authority in"):
            get(f"https://127.0.0.1:{master.port}", here)
        with pytest.raises(AuthenticationError, match="no authority in"):
            client_of(master, here)


def test_a_client_of_another_authority_is_refused(folder, others):
    here = {**tls_of(others), "RANKMESH_TLS_CA": tls_of(folder)["RANKMESH_TLS_CA"]}
    with served(tls_of(folder)) as master, pytest.raises(AuthenticationError, match="does not know the authority"):
        get(f"https://127.0.0.1:{master.port}", here)


def test_a_client_without_a_certificate_is_refused(folder):
    here = {"RANKMESH_TLS_CA": tls_of(folder)["RANKMESH_TLS_CA"]}
    with served(tls_of(folder)) as master, pytest.raises(AuthenticationError, match="requires a certificate"):
        get(f"https://127.0.0.1:{master.port}", here)


def test_a_certificate_of_another_name_is_refused(folder):
    with served(tls_of(folder)) as master, in_environment(tls_of(folder)):
        sock = socket.create_connection(("127.0.0.1", master.port), SECONDS)
        with (
            tls.client_side(sock, "there.example", master.port) as secured,
            pytest.raises(AuthenticationError) as caught,
        ):
            secured.handshake()
    assert "it has here, localhost, 127.0.0.1, 0:0:0:0:0:0:0:1, and not there.example" in str(caught.value)


def test_an_expired_certificate_is_refused(tmp_path):
    with served(tls_of(tmp_path, validity=EXPIRED)) as master, pytest.raises(AuthenticationError, match="expired"):
        get(f"https://127.0.0.1:{master.port}", tls_of(tmp_path))


def test_a_client_without_tls_at_a_tls_port_is_told_so(folder, caplog, monkeypatch):
    monkeypatch.setattr(peer_credentials._warning, "_next", 0.0)
    with served(tls_of(folder)) as master:
        url = f"http://127.0.0.1:{master.port}"
        with pytest.raises(urllib.error.HTTPError, match="400") as caught:
            urllib.request.urlopen(url, timeout=SECONDS)
        assert b"serves HTTPS" in caught.value.read()
        caught.value.close()
        for token in ("", "secret"):
            variables = {"RANKMESH_TOKEN": token}
            with pytest.raises(NoResponseError, match="it takes connections with TLS alone"):
                get(url, variables)
    with served(required(folder)) as master, pytest.raises(DistNetworkError, match="the other side requires TLS"):
        client_of(master, {})
    assert "the client does not use TLS" in caplog.text


def test_a_tls_client_at_a_plain_port_is_told_so(folder, caplog, monkeypatch):
    monkeypatch.setattr(peer_credentials._warning, "_next", 0.0)
    with served({}) as master:
        with pytest.raises(NoResponseError, match="the other side does not use TLS"):
            get(f"https://127.0.0.1:{master.port}", tls_of(folder))
        with pytest.raises(DistNetworkError, match="the other side does not use TLS"):
            client_of(master, tls_of(folder))
    assert "the client uses TLS" in caplog.text


def test_a_client_that_does_not_complete_the_tls_handshake_is_cut_off(folder, monkeypatch):
    from rankmesh_agent.http import uvicorn_server

    monkeypatch.setattr(uvicorn_server, "HEAD_SECONDS", 0.05)
    with served(tls_of(folder)) as master, socket.create_connection(("127.0.0.1", master.port), SECONDS) as silent:
        assert silent.recv(1) == b""


def test_required_tls_refuses_urls_without(folder):
    with served({}) as master, pytest.raises(ValueError, match="RANKMESH_TLS=require refuses http://127"):
        get(f"http://127.0.0.1:{master.port}", required(folder))


def test_required_tls_refuses_to_serve_without(folder):
    with pytest.raises(ValueError, match="a server needs RANKMESH_TLS_CERT"), served({"RANKMESH_TLS": "require"}):
        pass


# Between ranks


@contextlib.contextmanager
def listening(variables: dict[str, str]) -> Iterator[TcpListener]:
    with in_environment(variables):
        listener = TcpTransport("secret").listen("127.0.0.1:0")
        with contextlib.closing(listener):
            yield listener


def error_of(listener: TcpListener, variables: dict[str, str]) -> str:
    """Return the error of a rank that connects with other variables."""
    with in_environment(variables), pytest.raises(DistNetworkError) as caught:
        dial(TcpTransport("secret"), listener.address, listener)
    return str(caught.value)


@pytest.mark.parametrize(
    ("theirs", "ours", "error"),
    [
        ("here", "", "the other side requires TLS: set RANKMESH_TLS_CERT"),
        ("", "here", "no authority in RANKMESH_TLS_CA"),
        ("other", "here", "no authority in RANKMESH_TLS_CA"),
        ("here", "other", "no authority in RANKMESH_TLS_CA"),
    ],
)
def test_ranks_that_cannot_have_tls_are_not_connected(folder, others, theirs, ours, error):
    sides = {"": {}, "here": required(folder), "other": required(others)}
    with listening(sides[theirs]) as listener:
        assert error in error_of(listener, sides[ours])


def test_a_rank_whose_certificate_has_another_authority_is_refused(folder, others):
    insider = required(others) | {"RANKMESH_TLS_CA": tls_of(folder)["RANKMESH_TLS_CA"]}
    with listening(required(folder)) as listener:
        assert "does not know the authority of this host's certificate" in error_of(listener, insider)


def some_calls(me: Me) -> None:
    me.init(timeout=60)
    array = np.full(1 << 20, me.rank, np.float32)
    dist.all_reduce(array)
    assert (array == sum(range(me.size))).all()
    objects = [None] * me.size
    dist.all_gather_object(objects, {"rank": me.rank})
    assert [each["rank"] for each in objects] == [*range(me.size)]
    dist.destroy_process_group()


def attached_calls(me: Me) -> None:
    me.init(timeout=60)
    array = np.full(1 << 20, me.rank, np.float32)
    dist.all_reduce(array)
    assert (array == sum(range(me.size))).all()
    if me.rank == 0:
        with contextlib.closing(HttpClient("secret")) as client:
            listed = client.request("GET", f"{os.environ[GATEWAY]}/v1/ranks", timeout=SECONDS).json()
        url = next(each["member"]["http"] for each in listed if each["member"]["rank"] == 0)
        assert url.startswith("https://")
        assert fetch_snapshot(url, "secret", SECONDS) is not None
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.processes
def test_processes_attach_and_snapshots_are_taken_over_tls(ranks: Ranks, folder):
    """Over TCP: the agents' unix sockets are in a directory that the ranks do not see."""
    variables = {**required(folder), "RANKMESH_TOKEN": "secret", "RANKMESH_TRANSPORT": "tcp"}
    cluster = Cluster(variables)
    try:
        cluster.grow(2)
        assert cluster.url.startswith("https://")
        ranks.run(attached_calls, 2, env={**variables, "RANKMESH_HOSTING": "attached", GATEWAY: cluster.url})
    finally:
        cluster.close()


@pytest.mark.processes
def test_a_job_runs_with_tls_required(ranks: Ranks, folder):
    """In shared memory; the sweep below has TCP."""
    ranks.run(some_calls, 3, env={**required(folder), "RANKMESH_TRANSPORT": "shm"})


def some_cells(me: Me, cells: list[list[object]]) -> None:
    from support.sweep.cover import sweep

    me.init(timeout=60)
    sweep(me, "api", cells, dist)
    dist.destroy_process_group()


@pytest.mark.processes
def test_results_over_tls_are_those_of_numpy(ranks: Ranks, folder):
    """A part of what tests/sdk/test_sweep.py covers."""
    from support.sweep.cover import cells_of

    cells = cells_of("api", (3,))[0][::5]
    environment = {**required(folder), "RANKMESH_TRANSPORT": "tcp"}
    reported = [rank.reported["api"] for rank in ranks.run(some_cells, 3, env=environment, cells=cells)]
    assert not [text for each in reported for text in each["wrong"]]
    assert len({each["digest"] for each in reported}) == 1
