"""The token and the dashboard's link of a real job, for its owner."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from support.command import Job, here
from support.processes import free_port

pytestmark = pytest.mark.processes


def test_the_token_is_printed_for_the_owner_of_the_job(job: Job):
    assert here("token", "--gateway", job.url) == (0, f"{job.token}\n", "")
    reading = here("token", "--gateway", job.url, "--role", "read").stdout
    assert reading not in ("", f"{job.token}\n")
    assert here("token", RANKMESH_TOKEN="given").stdout == "given\n"
    code, stdout, stderr = here("token", "--gateway", f"127.0.0.1:{free_port()}")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert "there is no token: no rank of a job of yours runs on this host" in stderr
    assert here("get", f"{job.url}/v1/ranks").code == 0


def test_the_dashboards_link_has_a_code_and_no_token(job: Job):
    code, stdout, stderr = here("dashboard", "--gateway", job.url)
    link, _, once = stdout.rstrip("\n").partition("#code=")
    assert (code, link, stderr) == (
        0,
        f"{job.url}/",
        "rankmesh: the link opens the dashboard once, within 5 min, to read only\n",
    )
    assert job.token not in stdout
    exchange = urllib.request.Request(f"{link}v1/dashboard/sessions", headers={"Authorization": f"Bearer {once}"})
    with urllib.request.urlopen(exchange, b"", timeout=20) as answer:
        session = json.loads(answer.read())["token"]
    ranks = urllib.request.Request(f"{link}v1/ranks", headers={"Authorization": f"Bearer {session}"})
    with urllib.request.urlopen(ranks, timeout=20) as answer:
        assert len(json.loads(answer.read())) == 3
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(exchange, b"", timeout=20)
    assert here("dashboard", "--gateway", job.url, RANKMESH_TOKEN="another").code == 4
