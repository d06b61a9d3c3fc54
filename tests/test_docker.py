"""What docker/ has beside the image's description: small programs without dependencies."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", str(DOCKER / script), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60
    )


def test_more_agents_are_like_those_of_compose_yaml() -> None:
    reported = run("agents.py", "6").stdout
    for number, port in ((4, 8705), (5, 8706)):
        assert f"  agent-{number}:\n" in reported
        assert f"hostname: agent-{number}\n" in reported
        assert f'"127.0.0.1:{port}:{port}"' in reported
        line = f"command: python -m rankmesh_agent --host 0.0.0.0 --port {port} --url http://127.0.0.1:{port}\n"
        assert line in reported
        assert line.replace(str(port), "8701") in (ROOT / "compose.yaml").read_text()
    assert "agent-3" not in reported
    assert "agent-6" not in reported


def test_fewer_agents() -> None:
    assert run("agents.py", "2").stdout.splitlines()[1:] == [
        "services:",
        "  agent-2: {deploy: {replicas: 0}}",
        "  agent-3: {deploy: {replicas: 0}}",
    ]


@pytest.mark.parametrize("number", ["0", "257", "many"])
def test_no_such_number_of_agents(number: str) -> None:
    refused = run("agents.py", number)
    assert (refused.returncode, refused.stdout) == (2, "")


def test_the_image_gets_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert run("requirements.py").stdout.splitlines() == project["dependencies"]
    wanted = project["dependencies"] + project["optional-dependencies"]["examples"]
    assert run("requirements.py", "examples").stdout.splitlines() == wanted


@pytest.fixture
def serve() -> Callable[[int], int]:
    """Returns what serves one answer with a status at a port, which it returns."""
    servers: list[http.server.HTTPServer] = []

    def start(status: int) -> int:
        class Answers(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = status if (self.path, self.headers["Host"]) == ("/readyz", "localhost") else 404
                self.send_response(found)
                self.end_headers()
                self.wfile.write(b"what it says")

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
        servers.append(server)
        threading.Thread(target=server.handle_request, daemon=True).start()
        return server.server_port

    yield start
    for server in servers:
        server.server_close()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (404, 1)])
def test_the_health_check_goes_by_the_status(serve: Callable[[int], int], status: int, code: int) -> None:
    checked = run("health.py", HEALTH_PORT=str(serve(status)))
    assert (checked.returncode, checked.stdout.strip()) == (code, "what it says")


def test_the_health_check_says_that_nobody_answers() -> None:
    checked = run("health.py", HEALTH_PORT="1")
    assert checked.returncode == 1
    assert "nobody answers at port 1" in checked.stderr
