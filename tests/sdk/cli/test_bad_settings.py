"""Invalid settings: each command ends with one line that names the variable, and exit code 2, never a traceback."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import forked_python
from support.certificates import tls_of
from support.command import COMMAND, SECONDS, environment, here

CLIENTS = [
    ["status"],
    ["stacks"],
    ["diagnose"],
    ["doctor"],
    ["dashboard"],
    ["token"],
    ["get", "127.0.0.1:1/v1/jobs"],
    ["get", "/v1/jobs"],
    ["store", "keys"],
    ["store", "get", "key"],
    ["store", "wait", "key"],
]
SERVERS = [
    ["run", "--nproc-per-node", "1", "--no-python", "true"],
    ["gateway", "--port", "0"],
    ["agent", "--port", "0", "--gateway", "http://127.0.0.1:1"],
]
BAD = {
    "RANK": ["x", "-1"],
    "WORLD_SIZE": ["0", "two"],
    "LOCAL_RANK": ["-1"],
    "LOCAL_WORLD_SIZE": ["0"],
    "MASTER_PORT": ["99999", "port"],
    "RANKMESH_ATTEMPT": ["x"],
    "RANKMESH_JOIN": ["2"],
    "RANKMESH_TOKEN": ["rankmesh-job:broken"],
    "RANKMESH_TOKEN_FILE": ["/no/such/file", "/", "/dev/null"],
    "RANKMESH_TOKEN_USE": ["short"],
    "RANKMESH_TOKEN_READ": ["short"],
    "RANKMESH_PRIVATE_NETWORK": ["yes"],
    "RANKMESH_TRANSPORT": ["pigeon"],
    "RANKMESH_NATIVE": ["on", "2"],
    "RANKMESH_SLOT_BYTES": ["1"],
    "RANKMESH_FULL_MESH": ["x"],
    "RANKMESH_EAGER_BYTES": ["-1"],
    "RANKMESH_TIMEOUT": ["soon", "-1", "nan"],
    "RANKMESH_PICKLE": ["always"],
    "RANKMESH_MAX_BODY": ["0"],
    "RANKMESH_STORE_KEYS": ["0"],
    "RANKMESH_STORE_BYTES": ["x"],
    "RANKMESH_HOSTING": ["cloud"],
    "RANKMESH_FLIGHT_RECORDER": ["x"],
    "RANKMESH_DEBUG": ["LOUD"],
    "TORCH_DISTRIBUTED_DEBUG": ["LOUD"],
    "RANKMESH_TLS": ["foo"],
    "RANKMESH_TLS_CERT": ["/no/such/file"],
    "RANKMESH_TLS_KEY": ["/no/such/file"],
    "RANKMESH_TLS_CA": ["/no/such/file", "/", "/dev/null"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_clients(name: str, value: str) -> None:
    for command in CLIENTS if name in ("RANK", "RANKMESH_TLS_CA") else CLIENTS[:1]:
        code, stdout, stderr = here(*command, **{name: value})
        assert (code, stdout) == (2, ""), (command, stderr)
        assert (stderr[:10], stderr.count("\n")) == ("rankmesh: ", 1), (command, stderr)
        assert name in stderr, (command, stderr)


def test_a_gateway_that_is_none() -> None:
    for value in ("ftp://host:1", "http://", "no address", "http://host:x", "http://[::1"):
        for command in CLIENTS:
            if "127.0.0.1:1/v1/jobs" not in command:
                code, _, stderr = here(*command, RANKMESH_GATEWAY=value, RANKMESH_TOKEN="a token")
                assert (code, stderr.count("\n")) == (2 if command != ["token"] else 0, command != ["token"]), stderr


def test_required_tls_refuses_a_url_without_it() -> None:
    for command in CLIENTS:
        if command not in (["token"], ["get", "127.0.0.1:1/v1/jobs"]):
            variables = {
                "RANKMESH_TLS": "require",
                "RANKMESH_GATEWAY": "http://127.0.0.1:1",
                "RANKMESH_TOKEN": "a token",
            }
            code, _, stderr = here(*command, **variables)
            assert (code, stderr.count("\n")) == (2, 1), (command, stderr)
            assert "RANKMESH_TLS=require refuses http://127.0.0.1:1" in stderr
    code, _, stderr = here("get", "http://127.0.0.1:1/v1/jobs", RANKMESH_TLS="require")
    assert (code, stderr.count("\n")) == (2, 1), stderr


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[str]:
    """A server with a certificate of an authority that nobody else knows; its URL."""
    files = tls_of(tmp_path / "theirs", "127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files["RANKMESH_TLS_CERT"], files["RANKMESH_TLS_KEY"])
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                client.settimeout(SECONDS)
                context.wrap_socket(client, server_side=True).close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(SECONDS)


@pytest.mark.parametrize("ours", [True, False])
def test_an_untrusted_certificate(tls_server: str, tmp_path: Path, ours: bool) -> None:
    variables = tls_of(tmp_path / "ours", "127.0.0.1") if ours else {}
    known = "RANKMESH_TLS_CA" if ours else "the system"
    for command in [*CLIENTS, ["get", f"{tls_server}/v1/jobs"]]:
        if command in (["token"], ["get", "127.0.0.1:1/v1/jobs"]):
            continue
        code, _, stderr = here(*command, RANKMESH_GATEWAY=tls_server, RANKMESH_TOKEN="a token", **variables)
        assert (code, stderr.count("\n")) == (4, 1), (command, code, stderr)
        assert f"no authority in {known}" in stderr


@pytest.mark.processes
def test_servers(tmp_path: Path) -> None:
    for name, command in zip(("RANKMESH_TOKEN_FILE", "RANKMESH_TLS", "RANKMESH_TLS_CA"), SERVERS, strict=True):
        variables = environment(**{name: BAD[name][0]})
        done = forked_python.run([*COMMAND, *command], env=variables, text=True, timeout=SECONDS, cwd=tmp_path)
        assert done.returncode == 2, (name, done)
        assert name in done.stderr, done
        assert "Traceback" not in done.stderr, done
