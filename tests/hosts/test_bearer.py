"""A bearer token that comes from another host."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

TOKEN = "the secret that both hosts know"
GATEWAY = "exec rankmesh gateway --host 0.0.0.0 --port 8700"
CURL = f"curl -s -w ' %{{http_code}}' -H 'Authorization: Bearer {TOKEN}' http://host1:8700/v1/jobs"


@pytest.mark.parametrize(("private", "status"), [("", "403"), ("1", "200")])
def test_it_is_accepted_on_a_private_network_alone(hosts, private, status) -> None:
    gateway = hosts.start("host1", GATEWAY, RANKMESH_TOKEN=TOKEN, RANKMESH_PRIVATE_NETWORK=private)
    gateway.wait_for("ready")
    assert hosts.output("host1", CURL).endswith(" 200"), "from the gateway's own host, by its address"
    answer = hosts.output("host2", CURL)
    assert answer.endswith(f" {status}")
    assert ("cleartext-token" in answer) == (not private)
    assert hosts.output("host2", "rankmesh get http://host1:8700/v1/jobs", RANKMESH_TOKEN=TOKEN) == "[]"
    gateway.end()
