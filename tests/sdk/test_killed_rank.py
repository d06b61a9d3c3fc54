"""A rank that is killed, as the gateway shows it: ranks are processes, and nobody waits for anything."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from support.processes import DEADLINE, Me, Ranks, wait_until

import rankmesh as dist

pytestmark = pytest.mark.processes


def get(url: str, token: str = "") -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
        return json.load(answer)


def events(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All that happened and happens, as server-sent events say it."""
    with urllib.request.urlopen(f"{url}/v1/events?after=0", timeout=DEADLINE) as answer:
        kind = ""
        for line in answer:
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                kind = value
            elif field == "data":
                yield kind, json.loads(value)


def wait_until_seen(me: Me) -> None:
    """Make no call for as long as the test lasts."""
    me.init(init_method="env://")
    dist.barrier()
    me.mark(f"computing-{me.rank}")
    me.wait_for("seen")
    os._exit(0)


def test_it_shows_as_failed_and_in_the_events(ranks: Ranks, gateway: str) -> None:
    started = ranks.start(wait_until_seen, 3, env={"RANKMESH_GATEWAY": gateway})
    ranks.wait_for(*(f"computing-{rank}" for rank in range(3)))
    happened = events(gateway)
    started[1].kill()

    def failed() -> dict[str, Any] | None:
        infos = {info["member"]["rank"]: info for info in get(f"{gateway}/v1/ranks")}
        return infos[1] if infos[1]["state"] == "failed" else None

    info = wait_until(failed, "rank 1 to show as failed")
    assert "lost its connection to it" in info["reason"], "after 10 s without a heartbeat the reason is that"
    reported = next(reported for kind, reported in happened if kind == "rank-failed")
    assert reported["ranks"] == [1]
    assert f"pid {started[1].pid}" in reported["detail"]

    def states() -> list[str]:
        return [info["state"] for info in get(f"{gateway}/v1/ranks")]

    # One that had no core for seconds is suspect until its next heartbeat.
    wait_until(lambda: states() == ["alive", "failed", "alive"], "the others to show as alive")
    ranks.mark("seen")
    happened.close()  # type: ignore[attr-defined]
    ranks.wait(started)


SCRIPT = """
import os, pathlib, time
import rankmesh as dist
dist.init_process_group()
dist.barrier()
path = pathlib.Path(f"pid-{dist.get_rank()}.new")
path.write_text(str(os.getpid()))
path.rename(path.with_suffix(""))
while not pathlib.Path("seen").exists():
    time.sleep(0.05)
os._exit(0)
"""


def test_the_launcher_knows_how_it_ended(ranks: Ranks) -> None:
    (ranks.folder / "script.py").write_text(SCRIPT)
    arguments = ["--nproc-per-node", "2", "--master-port", "0", "--failure-grace", "60", "script.py"]
    launcher = ranks.command("-m", "rankmesh.run", *arguments, name="launcher", RANKMESH_TOKEN="secret")
    url = wait_until(lambda: re.search(r"gateway (http://\S+)", launcher.stderr), "the gateway's URL")[1]
    for rank in range(2):
        wait_until((ranks.folder / f"pid-{rank}").exists, f"rank {rank}: {launcher!r}")
    os.kill(int((ranks.folder / "pid-1").read_text()), signal.SIGKILL)

    def reason() -> str:
        (info,) = (info for info in get(f"{url}/v1/ranks", "secret") if info["member"]["rank"] == 1)
        return info["reason"] if "signal" in info["reason"] else ""

    assert wait_until(reason, "the launcher's word").startswith("its process ended with signal SIGKILL (9)")
    ranks.mark("seen")
    ranks.wait([launcher])
