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


@pytest.mark.parametrize("extra", ["core", "gpu", "gpu-cuda13", "examples"])
def test_the_locked_versions_are_those_that_the_project_asks_for(extra: str) -> None:
    requirements = pytest.importorskip("packaging.requirements")
    locked: dict[str, list[str]] = {}
    for entry in (DOCKER / "locked" / f"{extra}.txt").read_text().replace("\\\n", " ").splitlines():
        assert "--hash=sha256:" in entry
        pin = requirements.Requirement(entry.partition(" --hash")[0])
        locked.setdefault(pin.name, []).append(str(pin.specifier).removeprefix("=="))
    for line in run("requirements.py", *([extra] if extra != "core" else [])).stdout.splitlines():
        wanted = requirements.Requirement(line)
        versions = locked[wanted.name.replace("_", "-")]
        assert all(version in wanted.specifier for version in versions), f"{line}: run 'make lock'"


@pytest.mark.parametrize(
    ("extras", "configuration", "variables", "arguments"),
    [
        ([], "", {}, "--require-hashes -r locked/core.txt"),
        (["gpu"], "", {}, "--require-hashes -r locked/gpu.txt"),
        (["gpu-cuda13"], "", {}, "--require-hashes -r locked/gpu-cuda13.txt"),
        (["gpu", "mpi"], "", {}, "-r requirements.txt"),
        ([], "[global]\nno-index = true", {}, "-r requirements.txt"),
        ([], "[install]\nno-index = yes", {}, "-r requirements.txt"),
        ([], "[global]\nno-index = false", {}, "--require-hashes -r locked/core.txt"),
        ([], "", {"PIP_NO_INDEX": "1"}, "-r requirements.txt"),
    ],
)
def test_the_image_checks_hashes_where_it_has_them(
    tmp_path: Path, extras: list[str], configuration: str, variables: dict[str, str], arguments: str
) -> None:
    """They are not those of a base's own wheels, which it has where pip uses no index: pip itself says so."""
    (tmp_path / "pip.conf").write_text(configuration)
    for name, text in {
        "pip": f'if [ "$1" = config ]; then exec {sys.executable} -m pip "$@"; else echo "$@" >&2; fi',
        "find": ":",
        "python": f'exec {sys.executable} "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("requirements.py", "install.sh"):
        (tmp_path / name).write_bytes((DOCKER / name).read_bytes())
    (tmp_path / "locked").symlink_to(DOCKER / "locked")
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = {"PATH": path, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), **variables}
    done = subprocess.run(
        ["sh", "install.sh", *extras], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr.strip().endswith(f"install --disable-pip-version-check {arguments}")) == (
        0,
        True,
    )


def test_the_demo_is_attached_to_its_own_containers() -> None:
    """Without names 'up' attaches to all, and Ctrl-C stops the gateway and the agents."""
    found = [
        line.partition("--build ")[2].split()[:4]
        for name in ("compose.yaml", "docker/welcome.txt", "docs/docker.md", "README.md")
        for line in (ROOT / name).read_text().splitlines()
        if "--profile demo up" in line
    ]
    assert len(found) >= 3
    assert all(names == ["demo-0", "demo-1", "demo-2", "demo-3"] for names in found)


def test_every_container_is_limited_and_without_privileges() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the file; it comes with the development dependencies")
    for name in ("compose.yaml", "compose.gpu.yaml"):
        services = yaml.safe_load((ROOT / name).read_text())["services"]
        assert all(service["pids_limit"] and service["mem_limit"] for service in services.values())
    for service in yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values():
        assert service["ulimits"]["nofile"] == {"soft": 16384, "hard": 16384}
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


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
