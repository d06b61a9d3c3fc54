"""``python -m rankmesh_gateway``: what it serves as a process, and what keeps it from serving."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict

import httpx
import pytest

from rankmesh_gateway.__main__ import main


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process(ask, eventually, tmp_path, number):
    """The token, the host's own name and the advertised names; waiting joins are answered at a signal."""
    path = tmp_path / "token"
    if number == signal.SIGTERM:
        arguments, variables = ["--token-file", str(path), "--make-token"], {}
    else:
        arguments, variables = [], {"RANKMESH_TOKEN": "from the environment"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RANKMESH_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "rankmesh_gateway", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**clean, **variables, "RANKMESH_ADVERTISE": "gateway:8700, other"},
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("RankMesh gateway is ready at http://"), line + process.stderr.read()
        token = path.read_text().strip() if path.exists() else variables["RANKMESH_TOKEN"]
        with httpx.Client(base_url=line.split()[-1], timeout=30) as client:
            assert client.post("/v1/leave").status_code == 401
            client.headers["Authorization"] = f"Bearer {token}"
            for host, status in {
                socket.gethostname(): 200,
                "gateway:1": 200,
                "other": 200,
                "evil.example": 421,
            }.items():
                assert client.get("/health", headers={"Host": host}).status_code == status
            answers = []
            join = {"json": asdict(ask.join(0)), "headers": dict(client.headers), "timeout": 30}
            waiting = threading.Thread(target=lambda: answers.append(httpx.post(f"{client.base_url}/v1/join", **join)))
            waiting.start()
            eventually(lambda: client.get("/health").json()["ranks"] == 1)
        process.send_signal(number)
        output, log = process.communicate(timeout=180)
        assert (output, process.returncode) == ("", 0)
        assert re.search(r"INFO job '\w+': rank 0 .* has joined: 1 of \d ranks", log), log
        assert not re.search("ERROR|Traceback", log), log
        waiting.join(10)
        assert (answers[0].status_code, answers[0].json()["code"]) == (503, "gateway-closing")
    finally:
        process.kill()
        process.communicate()


REFUSED = {
    "no token beyond loopback": (["--host", "0.0.0.0", "--port", "0"], "Set RANKMESH_TOKEN"),
    "a port in use": (["--port", "{port}"], "127.0.0.1:{port} is in use by"),
    "no token file": (["--token-file", "/nowhere/token"], "No such file"),
    "an empty token file": (["--token-file", os.devnull], "is empty; put the token in it"),
    "no file for the token": (["--make-token"], "--make-token needs --token-file"),
    "no port": (["--port", "99999"], "give a number from 0 to 65535"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(monkeypatch, capsys, arguments, message):
    monkeypatch.delenv("RANKMESH_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        try:
            code = main([argument.format(port=port) for argument in arguments])
        except SystemExit as ended:  # argparse's
            code = ended.code
    errors = capsys.readouterr().err
    assert code == 2
    assert message.format(port=port) in errors
    assert errors.count("\n") == 1 or "usage: " in errors


def test_a_token_file_that_is_there_is_kept(tmp_path, capsys):
    path = tmp_path / "token"
    path.write_text("secret\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--token-file", str(path), "--make-token", "--port", str(taken.getsockname()[1])]) == 2
    assert path.read_text() == "secret\n"
    assert "is in use by" in capsys.readouterr().err
