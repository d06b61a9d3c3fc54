"""docs/hosts.md: its commands are run as they stand there, on two hosts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
SECRET = "the secret that both hosts know"
TRAIN = """\
import os
import time
from pathlib import Path
import numpy as np
import rankmesh as dist

dist.init_process_group()
gradient = np.full(1000, dist.get_rank(), np.float32)
dist.all_reduce(gradient)
gradient /= dist.get_world_size()
print(dist.get_rank(), gradient[0], flush=True)
{then}
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def page() -> dict[str, dict[str, str]]:
    """The page's commands by heading and host."""
    found: dict[str, dict[str, str]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        lines = re.findall(r"^(host\d)\$ (.+)$", section, re.MULTILINE)
        by_host = found[section.partition("\n")[0]] = dict.fromkeys(sorted({host for host, _ in lines}), "")
        for host, line in lines:
            by_host[host] += line.replace("RANKMESH_TOKEN=…", f"RANKMESH_TOKEN='{SECRET}'") + "\n"
    return found


@pytest.fixture
def script(hosts):
    """Returns what writes train.py, with something to do after the first collective."""
    return lambda then="": (hosts.folder / "train.py").write_text(TRAIN.format(then=then))


def documents(text: str) -> Iterator[Any]:
    """The JSON documents in a text."""
    while text := text.strip():
        document, end = json.JSONDecoder().raw_decode(text)
        yield document
        text = text[end:]


@pytest.mark.parametrize("way", ["With the launcher", "Without a launcher"])
def test_ranks_on_two_hosts_train_together(hosts, page, script, way) -> None:
    script()
    first, second = [hosts.start(host, commands) for host, commands in page[way].items()]
    assert (first.wait(), second.wait()) == (0, 0), hosts.transcript()
    assert "0 1.5" in first.output, hosts.transcript()
    assert "1 1.5" in first.output, hosts.transcript()
    assert "2 1.5" in second.output, hosts.transcript()
    assert "3 1.5" in second.output, hosts.transcript()


def test_what_carries_the_bytes_is_there_to_see(hosts, page, script) -> None:
    wait = "while True:\n    done = np.array([Path('enough').exists()])\n    dist.all_reduce(done, dist.ReduceOp.MIN)\n"
    script(then=wait + "    if done[0]:\n        break\n    time.sleep(0.1)")
    started = [hosts.start(host, commands) for host, commands in page["With the launcher"].items()]
    for each in started:
        each.wait_for("1.5")

    def see() -> Any:
        groups, info = documents(
            hosts.output("host1", page["See what carries the bytes"]["host1"], RANKMESH_TOKEN=SECRET)
        )
        return (*groups, info) if groups else None  # the ranks tell the gateway of their groups once a second

    world, info = wait_until(see, "the gateway to know the groups")
    assert (world["name"], world["medium"]) == ("world", "shm+tcp")
    assert info["transports"] == {"0": "tcp", "1": "tcp", "3": "segment"}
    assert (info["member"]["rank"], info["member"]["host"]) == (2, "host2")
    assert info["member"]["http"].startswith(f"http://{hosts.addresses['host2']}:")
    (hosts.folder / "enough").touch()
    assert [each.wait() for each in started] == [0, 0], hosts.transcript()


def test_a_host_that_is_cut_off_is_named_on_both_sides(hosts, page, script) -> None:
    script(then="while True: dist.all_reduce(gradient)")
    started = [hosts.start(host, commands) for host, commands in page["With the launcher"].items()]
    for each in started:
        each.wait_for("1.5")
    hosts.cut("host2")
    assert [each.wait() for each in started] == [1, 1], hosts.transcript()
    for each, ranks, other in zip(started, ("[23]", "[01]"), ("host2", "host1"), strict=True):
        expected = (
            rf"RankFailedError: rank {ranks} \({other}, pid \d+\) failed \(its host has answered nothing for \d+ s"
        )
        assert re.search(expected, each.output), hosts.transcript()


def test_a_short_interruption_is_sat_out(hosts, page, script) -> None:
    script(then="for _ in range(100): dist.all_reduce(gradient); time.sleep(0.02)")
    started = [hosts.start(host, commands) for host, commands in page["With the launcher"].items()]
    for each in started:
        each.wait_for("1.5")
    hosts.cut("host2")
    hosts.output("host1", "sleep 4")
    hosts.heal("host2")
    assert [each.wait() for each in started] == [0, 0], hosts.transcript()


def test_a_rank_that_is_stopped_is_waited_for(hosts, page, script) -> None:
    """Its kernel answers, also when others have sent more than it has room for."""
    script(then="print('pid', os.getpid())\nfor _ in range(3): dist.all_reduce(np.ones(8 << 20)); time.sleep(0.5)")
    started = [hosts.start(host, commands) for host, commands in page["With the launcher"].items()]
    for each in started:
        each.wait_for("pid")
    pids = wait_until(lambda: (found := re.findall(r"pid (\d+)", started[1].output))[1:] and found, "both ranks' pids")
    hosts.output("host2", f"kill -STOP {' '.join(pids)}; sleep 13; kill -CONT {' '.join(pids)}")
    assert [each.wait() for each in started] == [0, 0], hosts.transcript()
