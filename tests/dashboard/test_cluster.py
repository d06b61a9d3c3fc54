"""The page of a gateway with real ranks: what they do shows, and what becomes of them."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
import pytest
from support.command import here
from support.processes import DEADLINE, Me, Rank, Ranks, free_port, wait_until

import rankmesh as dist
from rankmesh_agent.wire.schemas import FAILED_SECONDS

pytestmark = pytest.mark.processes

TOKEN = "0123456789abcdef"


def work(me: Me, hold: int | None = None) -> None:
    """All-reduce until told to stop; the rank ``hold`` stays away from them while told so."""
    me.init(init_method="env://")
    pair = dist.new_group([0, 1])
    array = np.ones(1000, np.float32)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        more = np.array([not (me.folder / "stop").exists()])
        dist.broadcast(more, 0)
        if not more[0]:
            break
        while me.rank == hold and (me.folder / "hold").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        dist.all_reduce(array, dist.ReduceOp.MAX)
        if me.rank < 2:
            dist.all_reduce(array, dist.ReduceOp.MAX, group=pair)
        time.sleep(0.005)
    dist.destroy_process_group()


def work_or_fail(me: Me) -> None:
    """The same, for a job of which a rank is killed: the others are told, and go."""
    with contextlib.suppress(dist.DistBackendError):
        work(me)


def raise_in_one(me: Me) -> None:
    """Rank 1 raises as soon as it is told to."""
    me.init(init_method="env://")
    with contextlib.suppress(dist.DistBackendError):
        while True:
            if me.rank == 1 and (me.folder / "fail").exists():
                raise ValueError("no more data")
            dist.all_reduce(np.ones(2))


def place(url: str) -> Mapping[str, str]:
    """The variables of ranks that join a gateway."""
    _, host, port = re.split(r"://|:", url)
    return {"MASTER_ADDR": host, "MASTER_PORT": port}


def start_gateway(ranks: Ranks, port: int) -> tuple[Rank, str]:
    """Start a gateway at a port; return its process and URL."""
    process = ranks.command("-m", "rankmesh_gateway", "--port", str(port), name="gateway")
    wait_until(lambda: "\n" in process.stdout or process.code is not None, "the gateway to start")
    found = re.search(r"ready at (http://\S+)\n", process.stdout)
    assert found, process
    return process, found[1]


def launch(ranks: Ranks, body: Any, size: int, **arguments: Any) -> tuple[Rank, str]:
    """Have ``rankmesh run`` start ranks; return its process, and the URL of its gateway."""
    script = ranks.script(body, **arguments)
    text = script.read_text().replace("int(sys.argv[1]), int(sys.argv[2])", 'int(os.environ["RANK"]), int(sys.argv[1])')
    script.write_text(text.replace("import json, sys", "import json, os, sys"))
    command = ["-m", "rankmesh.run", "--nproc-per-node", str(size), str(script), str(size)]
    launcher = ranks.command(*command, name="launcher", RANKMESH_TOKEN=TOKEN)
    found = wait_until(
        lambda: re.search(r"gateway (http://[^\s)]+)", launcher.stdout + launcher.stderr), repr(launcher)
    )
    return launcher, found[1]


@pytest.mark.unreachable
def test_a_link_opens_the_page_once(ranks, visit):
    launcher, url = launch(ranks, work, 2)
    link = here("dashboard", "--gateway", url).stdout.strip()
    page = visit(link)
    page.wait_for_text("#count-ranks-note", "2 alive")
    assert page.page.url == f"{url}/"
    page.page.reload()
    page.wait_for_text("#count-ranks-note", "2 alive")
    again = visit(link)
    again.wait_for_text("#token-error", "This link has been used or has expired")
    assert not again.page.locator("#cluster").is_visible()
    ranks.mark("stop")
    ranks.wait([launcher])


@pytest.mark.unreachable
def test_a_job_of_the_launcher(ranks, visit):
    launcher, url = launch(ranks, work, 4, hold=3)
    page = visit(url)
    page.page.get_by_label("Token", exact=True).fill(TOKEN)
    page.page.get_by_role("button", name="Connect").click()
    page.wait_for_text("#count-ranks-note", "4 alive")
    page.until(lambda: page.page.locator("#groups .members").count() == 2, "both groups")
    (world, pair) = page.page.locator("#groups .members").all()
    assert (world.locator("li").count(), pair.locator("li").count()) == (4, 2)
    page.until(lambda: not page.text("#operations-chart .figure").startswith("0/"), "operations to be counted")
    page.until(lambda: not page.text("#bytes-chart .figure").startswith("0 B"), "bytes to be counted")
    page.wait_for_text("#log", "is complete: 4 ranks")

    bearer = {"Authorization": f"Bearer {TOKEN}"}
    agent = httpx.get(f"{url}/v1/ranks", headers=bearer, timeout=DEADLINE).json()[1]["member"]["http"]
    assert httpx.put(f"{agent}/v1/store/epoch/1", headers=bearer, content=b"x", timeout=DEADLINE).is_success
    page.wait_for_text("#store", "epoch/1")

    ranks.mark("hold")
    page.wait_for_text("#inflight .missing", "missing 3")
    assert "all_reduce" in page.text("#inflight")
    assert "arrived 0-2" in page.text("#inflight")
    (ranks.folder / "hold").unlink()
    page.page.locator("#inflight").wait_for(state="hidden")

    ranks.mark("stop")
    ranks.wait([launcher])
    assert launcher.code == 0, launcher
    assert "Traceback" not in launcher.stderr, launcher
    page.wait_for_text("#connection", "connection lost since")
    announced = page.page.locator("#announcer").text_content()
    assert "The connection to the gateway is lost: the gateway has ended." in announced
    (job,) = page.rows("#jobs")
    assert job[1:3] == ["ended", "4 ranks"]
    assert page.page.locator("#connection").get_attribute("data-tone") == "quiet", "nothing has gone wrong"
    assert ", until " in job[3]


@pytest.mark.unreachable
def test_the_problem_of_a_stuck_job(ranks, visit):
    launcher, url = launch(ranks, work, 4, hold=3)
    page = visit(url)
    page.page.get_by_label("Token", exact=True).fill(TOKEN)
    page.page.get_by_role("button", name="Connect").click()
    page.wait_for_text("#count-ranks-note", "4 alive")
    ranks.mark("hold")
    page.wait_for_text("#problems-list", "rank 3 has not come to all_reduce #")
    page.wait_for_text("#problems-list", "; it is at test_cluster.py:")
    page.wait_for_text("#jobs", "stuck")
    page.page.get_by_text("Waits of the ranks").click()
    page.wait_for_text("#timelines", "all_reduce(float32[1000], MAX)")
    page.wait_for_text("#problems-list", "ranks 0-2 wait at test_cluster.py:")
    page.page.locator("#hosts").get_by_role("button", name="3", exact=True).click()
    page.wait_for_text("#rank-threads", "time.sleep(0.01)")
    page.wait_for_text("#rank-cpu", "of a core in the last")
    assert "broadcast(" in page.text("#rank-operations")
    page.page.keyboard.press("Escape")
    (ranks.folder / "hold").unlink()
    page.page.locator("#problems").wait_for(state="hidden")
    ranks.mark("stop")
    ranks.wait([launcher])
    assert launcher.code == 0, launcher
    page.wait_for_text("#connection", "connection lost since")


def test_a_killed_rank_shows_long_before_its_silence_would(ranks, gateway, visit):
    """Its connections close, which the others report; without that the gateway waits for FAILED_SECONDS."""
    page = visit(gateway)
    page.wait_for_text("#connection", "live")
    started = ranks.start(work_or_fail, 4, env=place(gateway))
    page.until(lambda: page.text("#count-ranks-note").count("4 alive"), "four ranks to be there")
    page.wait_for_text("#groups", f"world {ranks.job}")
    killed = started[2].kill(signal.SIGKILL)
    page.wait_for_text("#problems", "rank 2 (")
    assert time.monotonic() - killed < FAILED_SECONDS - 2, "the last heartbeat may have been some time before"
    page.wait_for_text("#hosts .state", "failed")
    page.until(lambda: "has failed: " in page.page.locator("#announcer").text_content(), "it to be announced")
    ranks.wait(started)


def test_the_line_of_an_exception(ranks, gateway, visit):
    page = visit(gateway)
    page.wait_for_text("#connection", "live")
    started = ranks.start(raise_in_one, 2, env=place(gateway))
    page.wait_for_text("#count-ranks-note", "2 alive")
    ranks.mark("fail")
    page.wait_for_text("#problems", "has failed: it ended with ValueError: no more data, at test_cluster.py:")
    page.page.locator("#hosts").get_by_role("button", name="1", exact=True).click()
    page.wait_for_text("#rank-reason", " in raise_in_one")
    ranks.wait(started)


@pytest.mark.unreachable
def test_a_gateway_that_is_started_anew(ranks, visit):
    port = free_port()
    first, url = start_gateway(ranks, port)
    started = ranks.start(work, 3, env=place(url))
    page = visit(url)
    page.wait_for_text("#count-ranks-note", "3 alive")
    page.wait_for_text("#log", "world complete")
    first.kill()
    ranks.wait([first])
    page.wait_for_text("#connection", "connection lost since")
    second, _ = start_gateway(ranks, port)
    page.wait_for_text("#connection", "live")
    page.wait_for_text("#log", "The gateway was started anew")
    page.until(lambda: page.text("#count-ranks-note") == "3 alive", "the ranks to report to it")
    ranks.mark("stop")
    ranks.succeed(started)
    second.kill(signal.SIGTERM)
    ranks.wait([second])
