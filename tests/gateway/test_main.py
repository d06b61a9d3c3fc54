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


def check_token(url: str, token: str) -> None:
    assert httpx.get(f"{url}/v1/ranks", timeout=30).status_code == 401
    assert httpx.get(f"{url}/v1/ranks", headers={"Authorization": f"Bearer {token}"}, timeout=30).status_code == 200


def test_the_environment(start):
    """The token, the host's own name, and the advertised names."""
    url = url_of(start("--port", "0", RANKMESH_TOKEN="secret", RANKMESH_ADVERTISE="gateway:8700, other"))
    check_token(url, "secret")
    for host, status in ((socket.gethostname(), 200), ("gateway:8700", 200), ("other", 200), ("evil.example", 421)):
        assert httpx.get(f"{url}/health", headers={"Host": host}, timeout=30).status_code == status


def test_a_token_file_is_made_once_and_then_read(start, tmp_path):
    path = tmp_path / "token"
    made = start("--port", "0", "--token-file", str(path), "--make-token")
    check_token(url_of(made), path.read_text().strip())
    made.terminate()
    made.wait(30)
    path.write_text("secret\n")
    check_token(url_of(start("--port", "0", "--token-file", str(path), "--make-token")), "secret")


def test_refusals(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = {
            ("--host", "0.0.0.0", "--port", "0"): "Set RANKMESH_TOKEN",
            ("--port", str(port)): f"127.0.0.1:{port} is in use by",
            ("--token-file", "/nowhere/token"): "No such file",
            ("--token-file", os.devnull): "is empty; put the token in it",
            ("--make-token",): "--make-token needs --token-file",
            ("--port", "99999"): "give a number from 0 to 65535",
        }
        for process, text in [(start(*given), text) for given, text in arguments.items()]:
            _, said = process.communicate(timeout=30)
            assert process.returncode == 2
            assert text in said
            assert said.count("\n") == 1 or "usage: " in said
