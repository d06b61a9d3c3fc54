"""docs/http.md is true: its commands run, on a gateway and two agents, and print what it says."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from support.consoles import fits, run, steps_of
from support.http_ranks import services
from support.processes import Ranks, wait_until

PAGE = Path(__file__).parent.parent.parent / "docs/http.md"
TOKEN = "a secret of the test"
SECONDS = 300.0
LATE = '"state":"suspect"', '"state":"alive"'
"""State of a rank whose heartbeats a busy machine delays, and what the page says."""
_OLDEST_CURL = (7, 84)
"""The first that writes an answer's header where it is asked to."""


def curl_version() -> tuple[int, ...]:
    path = shutil.which("curl")
    if path is None:
        return ()
    told = os.popen("curl --version").read()
    found = re.match(r"curl (\d+)\.(\d+)", told)
    return tuple(map(int, found.groups())) if found else ()


@pytest.fixture
def cluster(ranks: Ranks):
    """Addresses of a gateway and two agents, as the page names them."""
    with services(ranks, 2, RANKMESH_TOKEN=TOKEN) as urls:
        yield dict(zip(("GATEWAY", "A0", "A1"), urls, strict=True))


@pytest.mark.skipif(not curl_version(), reason="there is no curl on this machine, and the page's commands are curl's")
@pytest.mark.skipif(
    () < curl_version() < _OLDEST_CURL, reason=f"the page's commands are those of a curl from {_OLDEST_CURL} on"
)
def test_the_commands_print_what_the_page_says(ranks: Ranks, cluster, tmp_path):
    folder = tmp_path / "tour"
    folder.mkdir()
    steps = steps_of(PAGE.read_text())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = ranks.environment(RANKMESH_TOKEN=TOKEN, PATH=path, **cluster)
    wait_until(
        lambda: os.system(f"curl -sSf {cluster['A0']}/readyz {cluster['A1']}/readyz >/dev/null 2>&1") == 0, "the agents"
    )
    printed = run(steps, folder, environment, SECONDS)
    wrong = [
        f"line {step.line}: $ {step.command}\nthe page says:\n{step.printed}\nit printed:\n{found}"
        for step, found in zip(steps, printed, strict=True)
        if not fits(found.replace(*LATE), step.printed)
    ]
    assert not wrong, "\n\n".join(wrong)


def test_there_are_commands():
    assert len(steps_of(PAGE.read_text())) > 40
