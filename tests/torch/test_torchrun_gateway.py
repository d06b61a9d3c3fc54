"""``torchrun --rdzv-backend rankmesh``: a gateway as the rendezvous of torchrun's nodes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as c10d
import torch.distributed.elastic.rendezvous as elastic
from support.gateway_process import GatewayProcess
from support.processes import Ranks, free_port, plain_http_server, wait_until
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from rankmesh_agent.wire.credentials import for_job

pytestmark = pytest.mark.processes

TOKEN = "the secret of the gateway"
LONG = 60.0
Handler = elastic.RendezvousHandler


class Nodes:
    """Nodes of jobs at a gateway, in this process."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self.made: list[Handler] = []
        self._pool = ThreadPoolExecutor(8)

    def node(self, least: int, most: int, *, run_id: str = "job", endpoint: str = "", **options: Any) -> Handler:
        """Return a node's handler, made as torchrun makes it."""
        endpoint = endpoint or f"127.0.0.1:{self.gateway.port}"
        options = {"local_addr": "127.0.0.1", "last_call_timeout": "0", "join_timeout": "60", **options}
        parameters = elastic.RendezvousParameters("rankmesh", endpoint, run_id, least, most, **options)
        self.made.append(get_rendezvous_handler(parameters))
        return self.made[-1]

    def begin(self, node: Handler) -> Future[elastic.RendezvousInfo]:
        """Have a node come to the next rendezvous."""
        return self._pool.submit(node.next_rendezvous)

    def meet(self, *nodes: Handler) -> list[elastic.RendezvousInfo]:
        """Have nodes meet; return what they get."""
        return [each.result(LONG) for each in [self.begin(node) for node in nodes]]

    def shut_down(self, *nodes: Handler) -> None:
        for node in nodes:
            self.made.remove(node)
            node.shutdown()


@pytest.fixture
def gateway(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayProcess]:
    monkeypatch.setenv("RANKMESH_TOKEN", TOKEN)
    path = ranks.folder / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    found = GatewayProcess(ranks, keeps_state=False, options=["--token-file", str(path)])
    yield found
    found.end()


@pytest.fixture
def nodes(gateway: GatewayProcess) -> Iterator[Nodes]:
    found = Nodes(gateway)
    yield found
    found.shut_down(*found.made)


def places(met: list[elastic.RendezvousInfo]) -> list[tuple[int, int]]:
    return sorted((each.rank, each.world_size) for each in met)


def ports(met: list[elastic.RendezvousInfo]) -> set[int]:
    return {each.bootstrap_store_info.master_port for each in met}


def starts_again(node: Handler) -> None:
    wait_until(lambda: node.num_nodes_waiting() == 1, "the node is told")


def test_nodes_meet_and_have_a_store_and_another_one_for_their_ranks(nodes: Nodes) -> None:
    both = [nodes.node(2, 2) for _ in range(2)]
    one, other = met = nodes.meet(*both)
    assert places(met) == [(0, 2), (1, 2)]
    one.store.set("k", "v")
    assert other.store.multi_get(["k"]) == [b"v"]
    (port,) = ports(met)
    client = c10d.TCPStore(one.bootstrap_store_info.master_addr, port, is_master=False)
    assert client.num_keys() == 0
    assert [node.num_nodes_waiting() for node in both] == [0, 0]
    assert {(node.get_backend(), node.get_run_id(), node.is_closed()) for node in both} == {("rankmesh", "job", False)}
    assert all(node.use_agent_store for node in both)


def test_a_node_that_joins_begins_an_attempt_with_empty_stores(nodes: Nodes) -> None:
    first = nodes.node(1, 2)
    (alone,) = nodes.meet(first)
    assert places([alone]) == [(0, 1)]
    alone.store.set("k", "v")
    second = nodes.node(1, 2)
    joining = nodes.begin(second)
    starts_again(first)
    met = [*nodes.meet(first), joining.result(LONG)]
    assert places(met) == [(0, 2), (1, 2)]
    assert not met[1].store.check(["k"])
    assert len(ports(met) | ports([alone])) == 2


def test_all_start_again_when_the_ranks_of_one_node_fail(nodes: Nodes) -> None:
    both = [nodes.node(2, 2) for _ in range(2)]
    before = nodes.meet(*both)
    again = nodes.begin(both[0])
    starts_again(both[1])
    met = [*nodes.meet(both[1]), again.result(LONG)]
    assert places(met) == places(before)
    assert ports(met) != ports(before)


NODE = """\
import sys
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
options = {"local_addr": "127.0.0.1", "last_call_timeout": 60}
parameters = RendezvousParameters("rankmesh", sys.argv[1], "job", int(sys.argv[2]), 2, **options)
node = get_rendezvous_handler(parameters)
print("meets", node.next_rendezvous().world_size, flush=True)
END
"""


@pytest.mark.parametrize(
    ("least", "end", "reason"),
    [
        pytest.param(1, "", "has left", id="by a signal, which torchrun catches"),
        pytest.param(2, "import os; os._exit(1)", "is lost: its launcher has been silent", id="without a word"),
    ],
)
@pytest.mark.slow
def test_a_node_is_lost(nodes: Nodes, ranks: Ranks, least: int, end: str, reason: str) -> None:
    kept = nodes.node(least, 2, last_call_timeout="60")
    meeting = nodes.begin(kept)
    arguments = (f"127.0.0.1:{nodes.gateway.port}", str(least))
    lost = ranks.command("-c", NODE.replace("END", end), *arguments, name="node", RANKMESH_TOKEN=TOKEN)
    meeting.result(LONG)
    ranks.wait([lost])
    starts_again(kept)
    assert reason in kept._nodes.latest.reason


def test_the_first_that_shuts_down_closes_the_job_and_the_name_is_free_again(nodes: Nodes) -> None:
    both = [nodes.node(2, 2) for _ in range(2)]
    nodes.meet(*both)
    nodes.shut_down(both[0])
    wait_until(both[1].is_closed, "the other node is told")
    assert both[1].num_nodes_waiting() == 0, "its ranks go on"
    with pytest.raises(elastic.RendezvousClosedError, match=r"job 'job' at http://.* is over: .* has ended the job"):
        both[1].next_rendezvous()
    nodes.shut_down(both[1])
    assert places(nodes.meet(nodes.node(1, 1))) == [(0, 1)]


def test_a_spare_node_waits_and_ends_with_the_job(nodes: Nodes) -> None:
    first = nodes.node(1, 1)
    nodes.meet(first)
    waiting = nodes.begin(nodes.node(1, 1, join_timeout="1"))
    with pytest.raises(TimeoutError):
        waiting.result(2)
    first.set_closed()
    with pytest.raises(elastic.RendezvousGracefulExitError):
        waiting.result(LONG)


def test_a_gateway_that_is_started_again(nodes: Nodes) -> None:
    both = [nodes.node(2, 2) for _ in range(2)]
    before = nodes.meet(*both)
    nodes.gateway.end()
    assert [node.num_nodes_waiting() for node in both] == [0, 0], "the ranks go on"
    begun = [nodes.begin(node) for node in both]
    nodes.gateway.start()
    met = [each.result(LONG) for each in begun]
    assert places(met) == [(0, 2), (1, 2)]
    met[0].store.set("k", "v")
    assert met[1].store.get("k") == b"v"
    assert ports(met) != ports(before)


# Errors


def refused(nodes: Nodes, kind: type[Exception], match: str, number: int = 1, **options: Any) -> None:
    limit = "5" if kind is elastic.RendezvousTimeoutError else "60"
    node = nodes.node(number, number, join_timeout=limit, **options)
    with pytest.raises(kind, match=match):
        node.next_rendezvous()


def test_no_gateway_another_server_and_missing_nodes(nodes: Nodes) -> None:
    late, port = elastic.RendezvousTimeoutError, free_port()
    why = f"waited 5 s for the gateway of job 'job' at http://127.0.0.1:{port}: .*Connection refused"
    refused(nodes, late, why, endpoint=f"127.0.0.1:{port}")
    with plain_http_server() as port:
        why = "waited 5 s for the gateway of job 'job' at .* is not a RankMesh gateway"
        refused(nodes, late, why, endpoint=f"127.0.0.1:{port}")
    refused(nodes, late, "waited 5 s for the nodes of job 'job' at .*: 1 of 2 node.* are there", 2)


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("the secret of another gateway", "token"),
        (for_job(TOKEN, "other"), "'other'.*'job'|'job'.*'other'"),
    ],
    ids=["token", "job"],
)
def test_another_token(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, token: str, why: str) -> None:
    monkeypatch.setenv("RANKMESH_TOKEN", token)
    refused(nodes, elastic.RendezvousConnectionError, why)


def test_other_options(nodes: Nodes) -> None:
    nodes.meet(nodes.node(1, 2))
    why = r"has --nnodes 2, the first one had --nnodes 1:2; start all"
    refused(nodes, elastic.RendezvousConnectionError, why, 2)


@pytest.mark.parametrize("endpoint", ["host:port", "http://127.0.0.1:8700"])
def test_invalid_endpoints(nodes: Nodes, endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"port number|hostname"):
        nodes.node(1, 1, endpoint=endpoint)


def test_a_jobs_credential_is_enough_and_names_the_job(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_TOKEN", for_job(TOKEN, "train"))
    both = nodes.node(2, 2, run_id="none"), nodes.node(2, 2, run_id="train")
    met = nodes.meet(*both)
    met[0].store.set("k", "v")
    assert met[1].store.get("k") == b"v"


# torchrun itself

AGAIN = """\
import os, sys
import torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {int(total)}", flush=True)
dist.barrier()
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(1)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["gloo", "rankmesh"])
def test_the_second_attempt_of_torchruns_of_two_nodes(gateway: GatewayProcess, ranks: Ranks, backend: str) -> None:
    script = ranks.folder / "again.py"
    script.write_text(AGAIN)
    place = ("--rdzv-backend", "rankmesh", "--rdzv-endpoint", f"127.0.0.1:{gateway.port}")
    command = ("-m", "torch.distributed.run", *place, "--nnodes", "2", "--max-restarts", "1", str(script), backend)
    both = [ranks.command(*command, name=f"node{number}", RANKMESH_TOKEN=TOKEN) for number in range(2)]
    ranks.wait(both, seconds=240)
    assert [node.code for node in both] == [0, 0], ranks.transcript()
    printed = "".join(node.stdout for node in both)
    assert printed.count("rank 0 of 2") == printed.count("rank 1 of 2") == 2, ranks.transcript()
