"""The token and the dashboard's link of a real job, for its owner."""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest
from support.command import Job, here
from support.http_ranks import services
from support.me import GATEWAY, Me
from support.processes import Ranks, free_port

import rankmesh as dist
from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import CommandError
from rankmesh_agent.wire.credentials import Role, derive, for_job, for_lease

TOKEN = "the token of a gateway"
pytestmark = pytest.mark.processes


def test_a_new_token_and_the_authority_of_one():
    first, second = (here("token", "--new").stdout.strip() for _ in range(2))
    assert first != second
    assert len(bytes.fromhex(first)) == 32
    own, of_job, of_another = (
        here("token", "--ca", *options, RANKMESH_TOKEN=token).stdout
        for token, options in ((first, ()), (first, ("--job", "train")), (second, ()))
    )
    assert own.startswith("-----BEGIN CERTIFICATE-----")
    assert len({own, of_job, of_another}) == 3
    assert own == here("token", "--ca", RANKMESH_TOKEN=first).stdout
    assert here("token", "--ca", "--job", "train", RANKMESH_TOKEN=for_job(first, "train")).stdout == of_job


def test_the_token_is_printed_for_the_owner_of_the_job(job: Job):
    assert here("token", "--gateway", job.url) == (0, f"{job.token}\n", "")
    reading = here("token", "--gateway", job.url, "--role", "read").stdout
    assert reading not in ("", f"{job.token}\n")
    assert here("token", RANKMESH_TOKEN="given").stdout == "given\n"
    code, stdout, stderr = here("token", "--gateway", f"127.0.0.1:{free_port()}")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert "there is no token: no rank of a job of yours runs on this host" in stderr
    assert here("get", f"{job.url}/v1/ranks").code == 0


def test_the_credentials_of_a_job_and_of_a_lease_are_derived():
    own, lease = for_job("secret", "my job"), "ab" * 16
    assert here("token", "--job", "my job", RANKMESH_TOKEN="secret").stdout == f"{own}\n"
    reading = here("token", "--job", "my job", "--role", "read", RANKMESH_TOKEN="secret").stdout.strip()
    assert reading == derive(own, Role.READ)
    assert here("token", "--role", "read", RANKMESH_TOKEN=own).stdout.strip() == reading
    of_lease = for_lease(own, "my job", lease)
    for token in ("secret", own):
        assert here("token", "--job", "my job", "--lease", lease, RANKMESH_TOKEN=token).stdout == f"{of_lease}\n"
    for wrong, token, says in [
        (["--job", "other"], own, "is the credential of job 'my job'"),
        (["--lease", lease], "secret", "--lease needs --job"),
        (["--job", "x", "--lease", "1"], "secret", "32 hexadecimal digits"),
        ([], own[:-1], "is not complete"),
    ]:
        code, stdout, stderr = here("token", *wrong, RANKMESH_TOKEN=token)
        assert (code, stdout) == (2, "")
        assert says in stderr


def test_commands_ask_a_jobs_agents_with_its_credential(ranks: Ranks):
    """Its ranks know no other one; the gateway, and the command, have the token."""
    with services(ranks, 0, RANKMESH_TOKEN=TOKEN) as (url,):
        credential = {"RANKMESH_TOKEN": for_job(TOKEN, ranks.job), "RANKMESH_HOSTING": "embedded", GATEWAY: url}
        started = ranks.start(stay, 2, env=credential)
        ranks.wait_for("here-0", "here-1")
        for token in (TOKEN, credential["RANKMESH_TOKEN"]):
            variables = {"RANKMESH_TOKEN": token, "RANKMESH_GATEWAY": url}
            assert here("store", "set", "--job", ranks.job, "key", "value", **variables).code == 0
            assert here("store", "get", "--job", ranks.job, "key", **variables).stdout == "value"
            assert "in stay" in here("stacks", "--job", ranks.job, "1", "--patience", "20", **variables).stdout
            probed = here("doctor", "--job", ranks.job, "--json", "--mib", "0", "--patience", "20", **variables)
            assert [pair["reached"] for pair in probed.document["pairs"]] == [True, True]
        other = {"RANKMESH_TOKEN": for_job(TOKEN, "another"), "RANKMESH_GATEWAY": url}
        assert "there is no rank 1" in here("stacks", "1", **other).stderr
        ranks.mark("end")
        ranks.wait(started, to_succeed=True)


def stay(me: Me) -> None:
    me.init()
    me.mark(f"here-{me.rank}")
    me.wait_for("end")
    dist.destroy_process_group()


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


@pytest.mark.parametrize(("role", "status"), [("run", 200), ("read", 403)])
def test_the_dashboards_link_shows_what_the_role_may_see(job: Job, role: str, status: int):
    """The page asks for these; a click on a rank for its stacks."""
    code, stdout, stderr = here("dashboard", "--gateway", job.url, "--role", role)
    assert (code, "without the stacks" in stderr) == (0, role == "read")
    link, _, once = stdout.rstrip("\n").partition("#code=")

    def ask(path: str, token: str, body: bytes | None = None) -> tuple[int, bytes]:
        request = urllib.request.Request(f"{link}{path}", body, {"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, b""

    session = json.loads(ask("v1/dashboard/sessions", once, b"")[1])["token"]
    asked = ["v1/overview", "v1/rates", "v1/diagnosis", "v1/ranks/0/snapshot"]
    assert [ask(path, session)[0] for path in asked] == [200, 200, 200, status]
    assert ask("v1/groups/world/abort", session, b"{}")[0] == 403


OWN = "192.0.2.7"


@pytest.mark.parametrize(
    ("own", "variables", "published", "link", "tunnel"),
    [
        ("10.0.0.5", {}, True, "http://localhost:8700", ""),
        (OWN, {}, False, "http://gateway:8700", ""),
        ("10.0.0.5", {"RANKMESH_PRIVATE_NETWORK": "1"}, False, "http://gateway:8700", ""),
        ("10.0.0.5", {}, False, "http://localhost:8700", f"ssh -N -L 8700:{OWN}:8700 gateway"),
    ],
    ids=["in its container, or with its port at loopback", "on its host", "in a private network", "on another host"],
)
def test_the_link_is_one_that_a_browser_can_open(monkeypatch, own, variables, published, link, tunnel):
    def get(service: ServiceClient, path: str) -> dict[str, str]:
        if service.url == "http://localhost:8700" and not published:
            raise CommandError("no gateway answers")
        return {"id": "one"}

    class Connection(contextlib.nullcontext[None]):
        def __enter__(self) -> Any:
            return SimpleNamespace(getsockname=lambda: (own, 1), getpeername=lambda: (OWN, 8700))

    monkeypatch.setattr(ServiceClient, "get", get)
    monkeypatch.setattr(ServiceClient, "post", lambda *_: {"code": "secret-code", "expires_in": 300})
    monkeypatch.setattr(socket, "create_connection", lambda *_: Connection())
    code, stdout, stderr = here("dashboard", "--gateway", "gateway:8700", RANKMESH_TOKEN="a token", **variables)
    assert (code, stdout) == (0, f"{link}/#code=secret-code\n")
    assert [line.partition("leave it: ")[2] for line in stderr.splitlines()[1:]] == ([tunnel] if tunnel else [])
