"""``python -m rankmesh_gateway`` as a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict

import httpx
import pytest

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a gateway with arguments and environment variables; none outlives the test."""
    started = []

    def run(*arguments: str, **environ: str) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RANKMESH_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "rankmesh_gateway", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean | environ,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline()
    assert line.startswith("RankMesh gateway is ready at http://"), line + process.stderr.read()
    return line.split()[-1]


def refusal(process: subprocess.Popen[str]) -> str:
    """Return the one line that a gateway which cannot start says."""
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal_and_sends_waiting_joins_away(start, ask, eventually, number):
    process = start("--port", "0")
    url = url_of(process)
    answers = []
    client = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/v1/join", json=asdict(ask.join(0)), timeout=30))
    )
    client.start()
    eventually(lambda: httpx.get(f"{url}/health", timeout=30).json()["ranks"] == 1)
    process.send_signal(number)
    rest, said = process.communicate(timeout=30)
    client.join(10)
    assert (process.returncode, rest, said) == (0, "", "")
    assert (answers[0].status_code, answers[0].json()["code"]) == (503, "gateway-closing")


@pytest.mark.parametrize("source", ["file", "environment"])
def test_the_token(start, tmp_path, source):
    if source == "file":
        path = tmp_path / "token"
        path.write_text("secret\n")
        process = start("--port", "0", "--token-file", str(path))
    else:
        process = start("--port", "0", RANKMESH_TOKEN="secret")
    url = url_of(process)
    assert httpx.get(f"{url}/v1/ranks", timeout=30).status_code == 401
    assert httpx.get(f"{url}/v1/ranks", headers={"Authorization": "Bearer secret"}, timeout=30).status_code == 200


def test_its_own_host_name_and_advertised_ones_are_known(start):
    url = url_of(start("--port", "0", RANKMESH_ADVERTISE="gateway:8700, other"))
    for host, status in ((socket.gethostname(), 200), ("gateway:8700", 200), ("other", 200), ("evil.example", 421)):
        assert httpx.get(f"{url}/health", headers={"Host": host}, timeout=30).status_code == status


def test_beyond_loopback_it_wants_a_token(start):
    assert "Set RANKMESH_TOKEN" in refusal(start("--host", "0.0.0.0", "--port", "0"))


def test_a_port_in_use(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal(start("--port", str(port)))
    assert f"127.0.0.1:{port} is in use by" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--token-file", "/nowhere/token"), "No such file"),
        (("--token-file", os.devnull), "is empty; put the token in it"),
    ],
)
def test_a_token_file_that_is_no_use(start, arguments, said):
    assert said in refusal(start(*arguments))


def test_a_fresh_token_is_made_and_kept(start, tmp_path):
    path = tmp_path / "token"
    for _ in range(2):
        process = start("--port", "0", "--token-file", str(path), "--make-token")
        url, token = url_of(process), path.read_text().strip()
        assert httpx.get(f"{url}/v1/ranks", timeout=30).status_code == 401
        assert httpx.get(f"{url}/v1/ranks", headers={"Authorization": f"Bearer {token}"}, timeout=30).status_code == 200
        process.terminate()
        process.wait(30)


def test_a_fresh_token_needs_a_file_to_be_in(start):
    assert "--make-token needs --token-file" in start("--make-token").communicate(timeout=30)[1]


def test_a_port_that_is_none(start):
    process = start("--port", "99999")
    assert "give a number from 0 to 65535" in process.communicate(timeout=30)[1]
    assert process.returncode == 2
