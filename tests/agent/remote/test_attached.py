"""Attached processes compute as embedded ranks do: against NumPy, over a staging buffer, a unix socket and TCP."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from support.attached import SECONDS, TOKEN, attach, everywhere, in_thread, offer
from support.processes import wait_until
from support.sweep.cover import cells_of, go_through
from support.sweep.media import OverCommunicator

from rankmesh_agent.agent import Agent
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.job_membership import JoinTerms
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.remote.client import AgentDialer
from rankmesh_agent.shared_memory.mapping import Mapping
from rankmesh_agent.standalone import Standalone
from rankmesh_agent.store import commands
from rankmesh_agent.wire.errors import (
    AgentTakenError,
    AuthenticationError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistNetworkError,
    JoinTimeoutError,
    RankFailedError,
)
from rankmesh_agent.wire.ops import ReduceOp

NOW, LATER = Options(SECONDS), Options(SECONDS, async_op=True)
_jobs = (f"attached-{os.getpid()}-{number}" for number in itertools.count())


def join(kind: str, agents: list[Standalone], gateway_url: str) -> list[Any]:
    """Return three ranks: embedded; attached with a staging buffer, or over TCP alone; or one of each kind."""
    job = next(_jobs)

    def join_one(rank: int) -> Any:
        if kind == "embedded" or (kind == "mixed" and rank == 2):
            settings = Settings(token=TOKEN, job=job)
            terms = JoinTerms(rank, 3, SECONDS, Deadline(SECONDS))
            return Agent(settings, lambda: gateway_url, terms, host="127.0.0.1")
        return attach(agents[rank], rank, 3, job=job, nearby=kind != "tcp" and (kind, rank) != ("mixed", 1))

    return everywhere(join_one, 3)


@pytest.fixture(scope="class", params=["staged", "unix", "tcp", "mixed"])
def world(request, standalones, gateway_url) -> Iterator[list[Any]]:
    """Three ranks, the same for all tests of a class; see join. Those of "unix" cannot make a staging buffer."""

    def no_memory(nbytes: int) -> Mapping:
        raise OSError(f"as if there were no {nbytes} bytes")

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "unix":
            patch.setattr("rankmesh_agent.remote.staging.create", no_memory)
        made = join(request.param, standalones, gateway_url)
        yield made
        for agent in made:
            agent.close()


def in_each_rank(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a thread for each rank of the world."""

    def run(self: Any, world: list[Any]) -> None:
        everywhere(lambda rank: test(self, world, rank), 3)

    return run


class TestCalls:
    def test_the_sweep(self, world):
        (cells,) = cells_of("communicator", (3,))
        found = everywhere(lambda rank: go_through(OverCommunicator(world[rank].world), cells[::5]), 3)
        assert not [text for each in found for text in each["wrong"]]
        assert len({each["digest"] for each in found}) == 1

    @in_each_rank
    def test_registered_arrays(self, world, rank):
        group = world[rank].world
        array = group.empty(np.dtype(np.float64), 5000, NOW)
        array[:] = rank
        group.all_reduce(array, ReduceOp.SUM, NOW)
        assert (array == 3).all()

    def test_an_engine_from_outside(self, world):
        class Engine:
            def all_reduce(self, array: np.ndarray, op: ReduceOp) -> None:
                array[:] = 42

        def run(rank: int) -> None:
            group = world[rank].new_group([0, 1, 2], SECONDS)
            group.use_custom_backend("outside", Engine())
            array = np.zeros(3)
            group.all_reduce(array, ReduceOp.SUM, NOW)
            assert (array == 42).all()
            assert group.backend == "outside"
            with pytest.raises(CollectiveMismatchError, match=r"float64\[1\].*float64\[2\].*float64\[3\]"):
                group.all_reduce(np.zeros(1 + rank), ReduceOp.SUM, NOW)

        everywhere(run, 3)

    def test_another_timeout(self, world, standalones):
        for rank, agent in enumerate(world):
            group = agent.world
            for wrong, error in ((-1, ValueError), (math.nan, ValueError), ("1", TypeError)):
                with pytest.raises(error, match="timeout must"):
                    group.set_timeout(wrong)
            assert group.timeout == SECONDS
            for timeout, seconds in ((0.2, 0.2), (timedelta(seconds=0.3), 0.3)):
                group.set_timeout(timeout)
                assert group.timeout == group.default_options.timeout == seconds
                current = standalones[rank].leases.agent
                if current is not None:  # HTTP clients of the agent get the same default
                    assert current.world.timeout == seconds
        with pytest.raises(CollectiveTimeoutError, match=r"waited 0\.3 s"):
            world[0].world.receive(np.empty(3), 1, 5, world[0].world.default_options)
        for agent in world:
            agent.world.set_timeout(SECONDS)

    def test_a_receive_that_times_out_leaves_the_group_working(self, world):
        with pytest.raises(CollectiveTimeoutError, match=r"recv from rank 1 \(tag 5\).*waited 0.1 s"):
            world[0].world.receive(np.empty(3), 1, 5, Options(0.1))
        everywhere(lambda rank: world[rank].world.barrier(NOW), 3)


@pytest.mark.parametrize("world", ["embedded", "staged", "unix", "tcp"], indirect=True)
class TestThreads:
    """Each waits for what is its own, whatever the other threads of the process wait for in the same group."""

    @pytest.mark.parametrize("how", ["recv", "irecv"])
    def test_messages_of_two_ranks(self, world, how):
        group = world[0].world

        def receive(source: int) -> int:
            if how == "recv":
                return group.receive(np.zeros(1000), source, 0, NOW)
            works[source].wait()
            return works[source].source_rank()

        for order in ((1, 2), (2, 1)):
            works = {source: group.receive(np.zeros(1000), source, 0, LATER) for source in order if how == "irecv"}
            waiting = {source: in_thread(receive, source) for source in (1, 2)}
            for source in order:
                world[source].world.send(np.ones(1000), 0, 0, NOW)
                assert waiting[source].result(SECONDS) == source

    def test_one_message_that_several_wait_for(self, world):
        received, staged, done = np.zeros(3), np.zeros(3), []

        def after() -> None:
            received[:] = staged
            done.append(None)

        work = world[0].world.receive(staged, 1, 0, LATER._replace(on_complete=after))

        def wait() -> bool:
            work.wait()
            return bool(received.all())

        waiting = [in_thread(wait) for _ in range(4)]
        assert not work.is_completed()
        world[1].world.send(np.ones(3), 0, 0, NOW)
        assert all(future.result(SECONDS) for future in waiting)
        assert work.is_completed()
        assert len(done) == 1

    def test_a_callback_that_waits(self, world):
        """For an earlier call, for a message, and for a call of another group."""
        others = everywhere(lambda rank: world[rank].new_group([0, 1, 2], SECONDS), 3)

        def run(rank: int) -> None:
            group = world[rank].world
            earlier = group.all_reduce(np.ones(3), ReduceOp.SUM, LATER)
            message = group.receive(np.zeros(3), (rank + 1) % 3, 0, LATER)

            def wait(_: object) -> bool:
                other = others[rank].all_reduce(np.ones(3), ReduceOp.SUM, LATER)
                return earlier.wait() and message.wait() and other.wait()

            waiting = group.all_reduce(np.ones(3), ReduceOp.SUM, LATER).get_future().then(wait)
            group.send(np.ones(3), (rank - 1) % 3, 0, NOW)
            assert waiting.wait(SECONDS)

        everywhere(run, 3)


class TestLeases:
    def test_the_agent_is_free_again(self, standalones):
        agent = standalones[0]
        for _ in range(3):
            attached = attach(agent, 0, 1, job=next(_jobs))
            assert agent.leases.lease is not None
            assert f"pid {os.getpid()}" in agent.leases.lease.holder
            attached.close()
            attached.close()
            assert agent.leases.lease is None

    def test_what_the_agent_refuses_is_raised_here(self, standalones):
        attached = attach(standalones[0], 0, 1, job=next(_jobs))
        with pytest.raises(AgentTakenError, match="is taken"):
            attach(standalones[0], 0, 1, job="another")
        attached.close()
        with pytest.raises(JoinTimeoutError) as caught:
            attach(standalones[0], 0, 2, job=next(_jobs), timeout=2.0)
        assert caught.value.ranks == (1,)

    def test_a_process_that_goes_while_it_joins_frees_the_agent(self, standalones, monkeypatch):
        agent = standalones[0]
        streams: list[Any] = []
        connect = AgentDialer.connect
        monkeypatch.setattr(AgentDialer, "connect", lambda *given: streams.append(connect(*given)) or streams[-1])
        future = in_thread(lambda: attach(agent, 0, 2, job=next(_jobs)))
        wait_until(lambda: agent.leases.lease, "the lease", SECONDS)
        streams[0].shutdown()
        with pytest.raises(DistNetworkError, match="went as this process joined"):
            future.result(SECONDS)
        wait_until(lambda: agent.leases.lease is None, "the lease to end", SECONDS)

    def test_the_agent_may_end_it(self, standalones):
        agent = standalones[0]
        attached = attach(agent, 0, 1, job=next(_jobs))
        assert agent.leases.release(agent.leases.lease.id, "a request over HTTP")
        with pytest.raises(RankFailedError, match=r"'agent-0' at http://127.* has ended: a request over HTTP"):
            attached.new_group([0], SECONDS)
        attached.close()

    @pytest.mark.parametrize("nearby", [True, False])
    def test_calls_under_way_say_why_the_agent_ends(self, standalones, nearby):
        job = next(_jobs)
        attached = everywhere(lambda rank: attach(standalones[rank], rank, 2, job=job, nearby=nearby), 2)
        message = in_thread(lambda: attached[0].world.receive(np.ones(1), 1, 0, NOW))
        value = in_thread(lambda: attached[0].store.execute(commands.Get("k", SECONDS)))
        wait_until(lambda: attached[0]._client._pool._all, "the calls", SECONDS)
        standalones[0].leases.release(standalones[0].leases.lease.id, "its agent was stopped by a signal")
        for call, error in ((message, RankFailedError), (value, DistNetworkError)):
            with pytest.raises(error, match=r"'agent-0' at http://127.* has ended: its agent was stopped by a signal"):
                call.result(2 * SECONDS)
        for each in attached:
            each.close()

    def test_a_group_that_could_not_be_made_has_another_id_than_the_next(self, standalones, monkeypatch):
        attached, failed = attach(standalones[0], 0, 1, job=next(_jobs)), []

        def start(self: LocalCommunicator, *_: Any) -> None:
            failed.append(self.id)
            raise DistNetworkError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(LocalCommunicator, "start", start)
            with pytest.raises(DistNetworkError, match="no room"):
                attached.new_group([0], SECONDS)
        assert failed
        assert attached.new_group([0], SECONDS).id not in failed
        attached.close()

    @pytest.mark.parametrize("nearby", [True, False])
    def test_another_token_is_refused(self, standalones, nearby):
        with pytest.raises(AuthenticationError, match="RANKMESH_TOKEN"):
            attach(standalones[0], 0, 1, job=next(_jobs), nearby=nearby, token="another")
        assert standalones[0].leases.lease is None

    @pytest.mark.parametrize(
        ("field", "value", "error"),
        [
            ("id", "another", "another agent than the one that was offered"),
            ("urls", ["http://127.0.0.1:1"], r"'agent-0' .* cannot be reached: http://127.0.0.1:1: "),
        ],
    )
    def test_a_wrong_offer(self, standalones, field, value, error):
        wrong = offer(standalones[0], nearby=False)
        setattr(wrong, field, value)
        with pytest.raises(DistNetworkError, match=error):
            attach(standalones[0], 0, 1, job=next(_jobs), offer=wrong)


@pytest.mark.parametrize("nearby", [True, False])
def test_the_agent_records_the_calls(standalones, nearby):
    job = next(_jobs)
    made = everywhere(lambda rank: attach(standalones[rank], rank, 2, job=job, nearby=nearby), 2)
    everywhere(lambda rank: [made[rank].world.all_reduce(np.ones(100), ReduceOp.SUM, NOW) for _ in range(3)], 2)
    current = standalones[0].leases.agent
    assert current is not None
    group = next(group for group in current.groups() if group.name == "world")
    assert (group.seq, group.last, group.medium) == (3, "all_reduce", "shm")
    assert group.bytes == 3 * 800
    records = current.recorder.records("world")
    assert [record.op for record in records if record.op == "all_reduce"] == ["all_reduce"] * 3
    for agent in made:
        agent.close()
