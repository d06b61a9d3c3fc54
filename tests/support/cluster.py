"""A cluster of containers for the tests, with a name of its own. Its ports are those of the usual one."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from support.processes import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "rankmesh-test"
BASE = os.environ.get("BASE", "python:3.11-slim")
AGENTS = 4
GATEWAY = "http://localhost:8700"
HEALTHY_SECONDS = 60


def run(
    *command: str, seconds: float = 300, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's root."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "COMPOSE_PROJECT_NAME": PROJECT, "COMPOSE_FILE": "compose.yaml", **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def compose(*arguments: str, **options: Any) -> str:
    """Run docker compose; return what it wrote to standard output."""
    return run("docker", "compose", *arguments, **options).stdout


class Cluster:
    """The cluster, once it is up."""

    def __init__(self) -> None:
        self.token = compose("exec", "-T", "gateway", "cat", "/run/rankmesh/token").strip()
        self.authorization = f"Authorization: Bearer {self.token}"
        self.client = {"RANKMESH_TOKEN": self.token, "RANKMESH_HOSTING": "attached"}
        """Variables of a process on this host that attaches to an agent."""

    def agent(self, number: int) -> str:
        """The base URL of an agent."""
        return f"http://localhost:{8701 + number}"

    def get(self, url: str) -> Any:
        """Return the JSON document at a URL."""
        request = urllib.request.Request(url, headers=dict([self.authorization.split(": ")]))
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def curl(self, *arguments: str, data: bytes = b"") -> bytes:
        """Run curl; return the answer's body."""
        command = ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "60", "-H", self.authorization]
        done = subprocess.run([*command, *arguments], input=data, capture_output=True, timeout=90)
        assert not done.returncode, (arguments, done.stdout, done.stderr)
        return done.stdout

    def agents(self) -> dict[str, str]:
        """The agents' states, by name."""
        return {entry["agent"]["name"]: entry["state"] for entry in self.get(f"{GATEWAY}/v1/agents")}

    def wait_until_free(self) -> None:
        """Wait until nobody has any of the agents."""
        free = {f"agent-{number}": "free" for number in range(AGENTS)}
        wait_until(lambda: self.agents() == free, f"all agents to be free: {self.agents()}")

    def hosts(self, job: str) -> list[str]:
        """The hosts of a job's ranks, by rank."""
        ranks = [entry for entry in self.get(f"{GATEWAY}/v1/ranks") if entry["job"] == job]
        return [entry["member"]["host"] for entry in sorted(ranks, key=lambda entry: entry["member"]["rank"])]


def processes() -> dict[int, str | None]:
    """The first process of each container, and when it was started: process ids are used again."""
    containers = json.loads(run("docker", "inspect", *compose("ps", "--quiet").split()).stdout)
    return {pid: started_at(pid) for pid in (container["State"]["Pid"] for container in containers)}


def started_at(pid: int) -> str | None:
    """When a process was started, None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def left() -> list[str]:
    """Containers, networks and volumes of the tests that are there."""
    label = f"label=com.docker.compose.project={PROJECT}"
    lists = (("ps", "--all", "--quiet"), ("network", "ls", "--quiet"), ("volume", "ls", "--quiet"))
    return [thing for what in lists for thing in run("docker", *what, "--filter", label).stdout.split()]


def down() -> None:
    """Stop the cluster and remove all of it."""
    compose("--profile", "demo", "down", "--volumes", "--remove-orphans", "--timeout", "10")
