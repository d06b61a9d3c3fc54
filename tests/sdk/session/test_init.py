"""Every way into a job, end to end: ranks are processes, and what they compute is compared with NumPy."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
import time

import numpy as np
import pytest
from support.processes import Me, Rank, Ranks, free_port, plain_http_server, wait_until

import rankmesh as dist
from rankmesh._session.init import _counting
from rankmesh._stores.key_file import KeyFile
from rankmesh_agent.config.launched import recorded

pytestmark = pytest.mark.processes


def exercise() -> None:
    """Collectives and messages of the world, and of a group."""
    rank, size, count = dist.get_rank(), dist.get_world_size(), 50_000
    mine, got = np.arange(count, dtype=np.float32) + rank, np.empty(count, np.float32)
    gathered = [np.empty(count, np.float32) for _ in range(size)]
    dist.all_gather(gathered, mine)
    np.testing.assert_array_equal(gathered, [np.arange(count) + each for each in range(size)])
    sending = dist.isend(mine, dst=(rank + 1) % size)
    assert dist.recv(got, src=(rank - 1) % size) == (rank - 1) % size
    sending.wait()
    np.testing.assert_array_equal(got, gathered[rank - 1])
    dist.all_reduce(mine)
    np.testing.assert_array_equal(mine, np.sum(gathered, axis=0))
    ends = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        dist.all_reduce(value := np.array(10.0**rank), group=ends)
        assert value == sum(10.0**each for each in {0, size - 1})
    dist.barrier()


def by(me: Me, options: dict) -> None:
    """Join by an init method, do everything, leave."""
    if "init_method" in options:
        options |= {"rank": me.rank, "world_size": me.size}
    dist.init_process_group(**options)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (me.rank, me.size, "mesh")
    exercise()
    dist.destroy_process_group()
    assert not dist.is_initialized()


def launched(me: Me) -> None:
    dist.init_process_group()
    me.mark(f"launched-{dist.get_rank()}-{dist.get_world_size()}")
    exercise()
    dist.destroy_process_group()


@pytest.mark.parametrize(("host", "size"), [("localhost", 3), ("[::1]", 2)])
def test_tcp(ranks: Ranks, host: str, size: int) -> None:
    ranks.run(by, size, options={"init_method": f"tcp://{host}:{port_of(host)}"})


def from_nowhere(me: Me, options: dict) -> None:
    """Join after the working directory has been removed."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    by(me, options)


def test_without_a_working_directory(ranks: Ranks) -> None:
    options = {"init_method": f"tcp://localhost:{free_port()}"}
    ranks.run(from_nowhere, 2, env={"RANKMESH_DUMP_DIR": "relative"}, options=options)


def test_file(ranks: Ranks) -> None:
    path = ranks.folder / "with space" / "meet"
    path.parent.mkdir()
    ranks.run(by, 3, options={"init_method": f"file://{path}"})
    assert not path.exists(), "who hosted the gateway removes its file when it leaves"


def port_of(host: str) -> int:
    try:
        return free_port("::1" if ":" in host else "127.0.0.1")
    except OSError:
        pytest.skip("this machine has no ::1")


# Ranks left out


def resources_once_alone(me: Me) -> object:
    """Return what the process has once the gateways that it had started have ended, after the last rank."""
    wait_until(lambda: me.resources()[0] == ["MainThread"], "the end of all threads")
    return me.resources()


def without_ranks(me: Me, methods: list[str], explicit: dict[str, int]) -> None:
    """Join by every method twice, rank left out or explicit; say the ranks got."""
    rank = explicit.get(str(me.rank), -1)
    before, got = None, []
    for _ in range(2):
        for method in methods:
            dist.init_process_group(init_method=method, world_size=me.size, rank=rank, timeout=30)
            everyone = [np.empty(2, np.int64) for _ in range(me.size)]
            dist.all_gather(everyone, np.array([dist.get_rank(), os.getpid()]))
            assert [got[0] for got in everyone] == list(range(me.size)), method
            assert len({got[1] for got in everyone}) == me.size, method
            got.append(dist.get_rank())
            dist.destroy_process_group()
        after = resources_once_alone(me)
        before = before or after
    assert after == before, f"{before} became {after}"
    me.report(got=got)


def test_ranks_that_are_left_out_are_given_out(ranks: Ranks, gateway: str) -> None:
    methods = [
        gateway,
        f"tcp://127.0.0.1:{free_port()}",
        f"file://{ranks.folder}/meet",
        f"tcp://239.255.41.7:{free_port()}",
    ]
    env = {"RANKMESH_BIND": "127.0.0.1"}  # the multicast stays on this machine
    started = ranks.start(without_ranks, 3, env=env, methods=methods, explicit={"1": 2})
    ranks.succeed(started)
    got = [rank.reported["got"] for rank in started]
    assert got[1] == [2] * 8, "an explicit rank is kept"
    assert all({got[0][number], got[2][number]} == {0, 1} for number in range(8)), got


def by_multicast(me: Me, method: str) -> None:
    dist.init_process_group(init_method=method, world_size=2, rank=me.rank, timeout=30)
    value = np.array([1.0])
    dist.all_reduce(value)
    assert value == 2
    dist.destroy_process_group()


def ipv6_multicast_address() -> str:
    """The address of this machine from which datagrams to an IPv6 multicast group leave; '' if there is no way."""
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("ff15::4d4d", 9))
        except OSError:
            return ""
        address = str(probe.getsockname()[0])
        return "" if address.startswith("fe80") else address


def test_ipv6_multicast(ranks: Ranks) -> None:
    # The loopback interface has no route for IPv6 multicast on most machines, so this takes another one, with a token.
    if not ipv6_multicast_address():
        pytest.skip("this machine has no route for IPv6 multicast, or no global address on it")
    method = f"tcp://[ff15:1e18:5d4c:4cf0:d02d:b659:53ba:b0a7]:{free_port()}"
    env = {"RANKMESH_TOKEN": "the secret of all"}
    ranks.succeed(ranks.start(by_multicast, 2, env=env, method=method))


# A store


class Folder:
    """The least that can be a store: a file a key."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def path(self, key: str) -> str:
        return os.path.join(self.folder, key.replace("/", "-"))

    def set(self, key: str, value: str) -> None:
        with open(self.path(f"{key}.new"), "w") as file:
            file.write(value)
        os.rename(self.path(f"{key}.new"), self.path(key))

    def get(self, key: str) -> bytes:
        with open(self.path(key), "rb") as file:
            return file.read()

    def wait(self, keys: list, timeout: object) -> None:
        wait_until(lambda: all(os.path.exists(self.path(key)) for key in keys), "keys", timeout.total_seconds())


def by_store(me: Me) -> None:
    """Join three times with one store, the last time by a name for it."""
    store = Folder(str(me.folder))

    def handler(url: str, timeout: object) -> object:
        assert (url, timeout.total_seconds()) == ("folder://here", 30)
        yield store, me.rank, me.size

    dist.register_rendezvous_handler("folder", handler)
    by_argument = {"store": store, "rank": me.rank, "world_size": me.size}
    for options in (by_argument, by_argument, {"init_method": "folder://here"}):
        dist.init_process_group(**options, timeout=30)
        assert (dist.get_rank(), dist.get_world_size()) == (me.rank, me.size)
        exercise()
        dist.destroy_process_group()


def test_a_store(ranks: Ranks) -> None:
    ranks.succeed(ranks.start(by_store, 2))


# Order, and again


def rank_0_late(me: Me, methods: list[str]) -> None:
    for number, method in enumerate(methods):
        if me.rank == 0:
            me.wait_for(*(f"trying-{number}-{rank}" for rank in range(1, me.size)))
            time.sleep(0.5)  # long enough for the others to find nobody there
        me.mark(f"trying-{number}-{me.rank}")
        dist.init_process_group(init_method=method, rank=me.rank, world_size=me.size, timeout=15)
        exercise()
        dist.destroy_process_group()


def test_ranks_in_reverse_order_and_rank_0_late(ranks: Ranks) -> None:
    methods = [f"tcp://127.0.0.1:{free_port()}", f"file://{ranks.folder}/meet"]
    ranks.succeed(ranks.start(rank_0_late, 3, ranks=[2, 1, 0], methods=methods))


def again(me: Me, methods: list[str]) -> None:
    """Join and leave by every method, several times in the same process, rank and size being in the URL."""
    before = None
    for _ in range(2):
        for method in methods:
            dist.init_process_group(init_method=method.format(rank=me.rank, size=me.size))
            assert (dist.get_rank(), dist.get_world_size()) == (me.rank, me.size), method
            value = np.full(100, me.rank + 1)
            dist.all_reduce(value)
            assert (value == sum(range(1, me.size + 1))).all(), method
            group = dist.new_group([0, 1])
            work = dist.all_reduce(np.ones(3), group=group, async_op=True)
            work.wait()
            dist.destroy_process_group(group)
            dist.destroy_process_group()
            assert not dist.is_initialized()
            del group, work  # they keep the group's memory as long as we have them
        after = resources_once_alone(me)
        before = before or after
    assert after == before, f"{before} became {after}"


def test_join_and_leave_again_and_again_by_every_method(ranks: Ranks, gateway: str) -> None:
    asked = "?rank={rank}&world_size={size}"
    port = free_port()
    path = ranks.folder / "meet"
    methods = [
        f"tcp://127.0.0.1:{port}{asked}",
        f"file://{path}{asked}",
        f"{gateway}{asked}",
        f"env://{asked}",
    ]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks.succeed(ranks.start(again, 2, env=env, methods=methods))


def meet_again(me: Me, method: str) -> None:
    """One rank lingers in the first world while the others, rank 0 last, begin the second one."""
    for world in range(2):
        dist.init_process_group(init_method=method, rank=me.rank, world_size=me.size, timeout=60)
        dist.barrier()
        if world == 0 and me.rank == 2:
            me.wait_for("rank-1-is-back")
            time.sleep(0.5)
        dist.destroy_process_group()
        if world == 0 and me.rank == 1:
            me.mark("rank-1-is-back")
        if world == 0 and me.rank == 0:
            me.wait_for("rank-1-is-back")


@pytest.mark.parametrize("method", ["file://{folder}/meet", "tcp://127.0.0.1:{port}"])
def test_the_next_world_meets_while_a_rank_of_the_last_one_lingers(ranks: Ranks, method: str) -> None:
    """The gateway of the first world outlives its host for that rank, and is not the second one's."""
    ranks.succeed(ranks.start(meet_again, 3, method=method.format(folder=ranks.folder, port=free_port())))


# Apart


def one_of_two_jobs(me: Me, method: str, group_name: str, amount: int) -> None:
    me.meet("started")
    dist.init_process_group(init_method=method, rank=me.rank, world_size=2, group_name=group_name)
    for _ in range(50):
        value = np.full(10, amount)
        dist.all_reduce(value)
        assert (value == 2 * amount).all(), value
    me.report(ranks=dist.get_process_group_ranks())
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["http by RANKMESH_JOB", "file"])
def test_two_jobs_at_one_place_do_not_mix(ranks: Ranks, gateway: str, way: str) -> None:
    started: list[Rank] = []
    by_name = way != "http by RANKMESH_JOB"
    for job, amount in (("one", 1), ("two", 100)):
        env = {} if by_name else {"RANKMESH_JOB": f"{ranks.job}-{job}"}
        name = f"{ranks.job}-{job}" if by_name else ""
        method = f"file://{ranks.folder}/meet" if by_name else gateway
        started += ranks.start(one_of_two_jobs, 2, env=env, method=method, group_name=name, amount=amount)
    ranks.succeed(started)
    assert not (ranks.folder / "meet").exists()


def job_a(me: Me, method: str) -> None:
    """Hosts the gateway, and ends when the other job is up."""
    dist.init_process_group(init_method=method, rank=0, world_size=1, group_name="a")
    me.mark("a-is-up")
    me.wait_for("b-0-is-up", "b-1-is-up")
    dist.destroy_process_group()


def job_b(me: Me, method: str) -> None:
    """Comes to the other job's gateway, outlives that job, and is still seen there."""
    import urllib.request

    me.wait_for("a-is-up")
    dist.init_process_group(init_method=method, rank=me.rank, world_size=2, group_name="b")
    me.mark(f"b-{me.rank}-is-up")

    def seen() -> list:
        with urllib.request.urlopen(f"{method.replace('tcp', 'http')}/v1/ranks", timeout=60) as answer:
            return sorted((there["job"], there["member"]["rank"], there["state"]) for there in json.load(answer))

    wait_until(lambda: seen() == [("a", 0, "left"), ("b", 0, "alive"), ("b", 1, "alive")], "the other job's end")
    dist.get_default_store().add("there", 1)
    dist.barrier()
    assert dist.get_default_store().get("there") == b"2"
    dist.destroy_process_group()


def test_a_gateway_whose_job_ends_stays_for_the_other_job(ranks: Ranks) -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    ranks.succeed([*ranks.start(job_a, 1, method=method), *ranks.start(job_b, 2, method=method)])


def test_a_stale_file_does_not_matter(ranks: Ranks) -> None:
    # The port of a gateway that died may by now be anybody's; what is there answers 404 to a join.
    with plain_http_server() as port:
        stale = {
            "dead gateway": f'{{"url": "http://127.0.0.1:{free_port()}", "id": "{"0" * 16}"}}',
            "another program's port": f'{{"url": "http://127.0.0.1:{port}", "id": "{"0" * 16}"}}',
            "no json": "{",
        }
        for name, content in stale.items():
            with contextlib.closing(KeyFile(str(ranks.folder / name))) as file:
                file.change(lambda _, content=content: (None, {f"rankmesh/gateway/{ranks.job}": content.encode()}))
        (ranks.folder / "empty").touch()
        methods = [f"file://{ranks.folder}/{name}" for name in (*stale, "empty")]
        ranks.succeed(ranks.start(rank_0_late, 2, ranks=[1, 0], methods=methods))


def killed_with_its_gateway(me: Me, method: str) -> None:
    dist.init_process_group(init_method=method, rank=me.rank, world_size=me.size)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_job_can_start_from_the_file_of_a_killed_one(ranks: Ranks) -> None:
    method = f"file://{ranks.folder}/rendezvous"
    ranks.wait(ranks.start(killed_with_its_gateway, 1, method=method))
    assert (ranks.folder / "rendezvous").exists()
    ranks.run(by, 2, options={"init_method": method})


@pytest.mark.parametrize(
    ("method", "rank", "counts"),
    [
        (None, -1, True),
        ("env://", 1, True),
        ("tcp://127.0.0.1:29500", 1, True),  # the launcher's gateway
        ("http://localhost:29500", 1, True),
        ("tcp://127.0.0.1:29501", -1, True),  # the launcher's ranks, at an address of their own
        ("tcp://127.0.0.1:29501", 0, False),
        ("http://127.0.0.1:29501", 0, False),
        ("file:///tmp/there", 0, False),
        ("file:///tmp/there?rank=0&world_size=2", -1, False),
        ("file:///tmp/there", -1, True),
        ("tcp://127.0.0.1:wrong", 0, False),
    ],
)
def test_a_job_that_the_caller_describes_is_not_the_launchers(monkeypatch, method, rank, counts):
    made = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANKMESH_GATEWAY": "http://127.0.0.1:29500"}
    made |= {"RANK": "1", "RANKMESH_JOIN": "1", "RANKMESH_JOB": "job"}
    for name, value in recorded(made).items():
        monkeypatch.setenv(name, value)
    found = _counting(method, rank, -1 if rank < 0 else 2, None)
    assert (found.get("RANKMESH_JOIN") == "1", found["RANKMESH_JOB"]) == (counts, "job")
    assert "RANKMESH_JOIN" not in _counting(None, 1, 2, object())
