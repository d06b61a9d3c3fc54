"""Where there is no Docker engine, no Compose or no base image, the tests are skipped with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from support.cluster import BASE, HEALTHY_SECONDS, Cluster, compose, down, left, processes, run, started_at


def _why_not() -> str:
    """Return why no cluster can be started here, or '' if it can."""
    for name in ("docker", "curl"):
        if shutil.which(name) is None:
            return f"there is no {name}"
    for command in (("docker", "info"), ("docker", "compose", "version")):
        tried = run(*command, check=False)
        if tried.returncode:
            return f"'{' '.join(command)}' says: {(tried.stderr or tried.stdout).strip().splitlines()[-1]}"
    if run("docker", "image", "inspect", BASE, check=False).returncode:
        pulled = run("docker", "pull", "--quiet", BASE, check=False)
        if pulled.returncode:
            return f"the base image {BASE} is not here and cannot be pulled: {pulled.stderr.strip()}"
    return ""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if why := _why_not():
        pytest.skip(f"no cluster: {why}")
    running = run("docker", "compose", "ps", "--quiet", COMPOSE_PROJECT_NAME="rankmesh").stdout
    assert not running, "a cluster runs here, and the tests need its ports: 'make cluster-down' first"
    down()
    try:
        compose("build", seconds=900)
        compose("up", "--detach", "--wait", "--wait-timeout", str(HEALTHY_SECONDS))
        yield Cluster()
        ran = processes()
    except BaseException:
        print(compose("logs", "--tail", "50", check=False))
        raise
    finally:
        down()
    assert left() == []
    assert [pid for pid, since in ran.items() if since is not None and started_at(pid) == since] == []
