"""Attached processes compute as embedded ranks do: against NumPy, over shared memory, a unix socket and TCP."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator
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
from rankmesh_agent.group.options import Options
from rankmesh_agent.progress.matching import ANY
from rankmesh_agent.remote.client import AgentDialer
from rankmesh_agent.store import commands
from rankmesh_agent.wire.errors import (
    AgentTakenError,
    AuthenticationError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistNetworkError,
    GroupAbortedError,
    JoinTimeoutError,
    KeyNotFoundError,
    LeaseEndedError,
    RankFailedError,
)
from rankmesh_agent.wire.ops import ReduceOp

NOW, LATER = Options(SECONDS), Options(SECONDS, async_op=True)
_jobs = (f"attached-{os.getpid()}-{number}" for number in itertools.count())


@pytest.fixture(params=["lent", "unix", "tcp", "mixed"])
def world(request, standalones, monkeypatch, gateway_url) -> Iterator[list[Any]]:
    """Three ranks: attached over shared memory, over a unix socket or TCP alone; or one of each and an embedded one.

    Or, where a test asks for it, three embedded ones.
    """
    job = next(_jobs)
    if request.param == "unix":
        monkeypatch.setattr("rankmesh_agent.remote.agent.shared_memory.unsupported", lambda: "as if it were")

    def join(rank: int) -> Any:
        if request.param == "embedded" or (request.param == "mixed" and rank == 2):
            settings = Settings(token=TOKEN, job=job)
            return Agent(settings, lambda: gateway_url, rank=rank, world_size=3, host="127.0.0.1", timeout=SECONDS)
        nearby = request.param != "tcp" and not (request.param == "mixed" and rank == 1)
        return attach(standalones[rank], rank, 3, job=job, nearby=nearby)

    made = everywhere(join, 3)
    yield made
    for agent in made:
        agent.close()


class TestCollectives:
    def test_the_sweep(self, world):
        (cells,) = cells_of("communicator", (3,))
        found = everywhere(lambda rank: go_through(OverCommunicator(world[rank].world), cells[::5]), 3)
        assert not [text for each in found for text in each["wrong"]]
        assert len({each["digest"] for each in found}) == 1

    def test_asynchronous_ones_keep_their_order(self, world):
        def run(rank: int) -> None:
            arrays = [np.full(10 + 20_000 * number, float(rank + number)) for number in range(20)]
            works = [
                world[rank].world.all_reduce(array, ReduceOp.SUM, LATER._replace(result=[array])) for array in arrays
            ]
            for number, (work, array) in enumerate(zip(works, arrays, strict=True)):
                assert work.wait()
                assert work.result()[0] is array
                assert (array == 3 + 3 * number).all()

        everywhere(run, 3)

    def test_registered_arrays(self, world):
        def run(rank: int) -> None:
            group = world[rank].world
            array = group.empty(np.dtype(np.float64), 5000, NOW)
            array[:] = rank
            group.all_reduce(array, ReduceOp.SUM, NOW)
            assert (array == 3).all()

        everywhere(run, 3)

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

    @pytest.mark.parametrize("timeout", [timedelta(seconds=0.3), 0.3], ids=["timedelta", "seconds"])
    def test_another_timeout(self, world, standalones, timeout):
        for rank, agent in enumerate(world):
            group = agent.world
            assert group.timeout == SECONDS
            for wrong, error in ((-1, ValueError), (math.nan, ValueError), ("1", TypeError)):
                with pytest.raises(error, match="timeout must"):
                    group.set_timeout(wrong)
            assert group.timeout == SECONDS
            group.set_timeout(timeout)
            assert group.timeout == group.default_options.timeout == 0.3
            current = standalones[rank].agent
            if current is not None:  # whoever asks the agent over HTTP finds the same
                assert current.world.timeout == 0.3
        with pytest.raises(CollectiveTimeoutError, match=r"waited 0\.3 s"):
            world[0].world.receive(np.empty(3), 1, 5, world[0].world.default_options)

    def test_groups(self, world):
        def run(rank: int) -> None:
            if rank:
                group = world[rank].new_group([2, 1], SECONDS)
                assert (group.rank, group.size, group.ranks) == (2 - rank, 2, (2, 1))
                array = np.ones(4)
                group.all_reduce(array, ReduceOp.SUM, NOW)
                assert (array == 2).all()
                world[rank].drop_group(group)
                with pytest.raises(GroupAbortedError, match="destroyed"):
                    group.barrier(NOW)

        everywhere(run, 3)


class TestMessages:
    def test_long_ones_arrive(self, world):
        count = 500_000

        def run(rank: int) -> None:
            group, following, previous = world[rank].world, (rank + 1) % 3, (rank - 1) % 3
            array = np.empty(count)
            work = group.receive(array, previous, 7, LATER._replace(result=[array]))
            group.send(np.full(count, float(rank)), following, 7, NOW)
            assert work.wait()
            assert work.source_rank() == previous
            assert (array == previous).all()
            if rank:
                group.send(np.full(count, float(rank)), 0, rank, NOW)
            else:
                for sender in (2, 1):
                    assert group.receive(array, ANY, sender, NOW) == sender
                    assert (array == sender).all()

        everywhere(run, 3)

    def test_one_that_nobody_sends_ends_in_time_and_the_group_goes_on(self, world):
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"recv from rank 1 \(tag 5\).*waited 0.3 s"):
            world[0].world.receive(np.empty(3), 1, 5, Options(0.3))
        assert time.monotonic() - began < SECONDS / 2
        everywhere(lambda rank: world[rank].world.barrier(NOW), 3)


@pytest.mark.parametrize("world", ["embedded", "lent", "unix", "tcp"], indirect=True)
class TestThreads:
    """Each waits for what is its own, whatever the other threads of the process wait for in the same group."""

    @pytest.mark.parametrize("first", [1, 2])
    @pytest.mark.parametrize("how", ["recv", "irecv"])
    def test_messages_of_two_ranks(self, world, how, first):
        group, second = world[0].world, 3 - first

        def receive(source: int) -> int:
            array = np.zeros(1000)
            if how == "recv":
                return group.receive(array, source, 0, NOW)
            works[source].wait()
            return works[source].source_rank()

        works = {}
        if how == "irecv":
            works = {source: group.receive(np.zeros(1000), source, 0, LATER) for source in (1, 2)}
        waiting = {source: in_thread(lambda source=source: receive(source)) for source in (1, 2)}
        for source in (first, second):
            world[source].world.send(np.ones(1000), 0, 0, NOW)
            assert waiting[source].result(SECONDS) == source

    def test_a_message_and_a_collective(self, world):
        group, array = world[0].world, np.zeros(3)
        receiving = in_thread(lambda: group.receive(array, 1, 0, NOW))
        everywhere(lambda rank: world[rank].world.barrier(NOW), 3)
        assert not receiving.done()
        waiting = in_thread(lambda: group.barrier(NOW))
        world[1].world.send(np.ones(3), 0, 0, NOW)
        assert receiving.result(SECONDS) == 1
        assert array.all()
        assert not waiting.done()
        everywhere(lambda rank: world[rank + 1].world.barrier(NOW), 2)
        waiting.result(SECONDS)

    def test_two_collectives(self, world):
        works = [world[0].world.all_reduce(np.ones(3), ReduceOp.SUM, LATER) for _ in range(2)]
        waiting = [in_thread(work.wait) for work in works]
        for future in waiting:
            everywhere(lambda rank: world[rank + 1].world.all_reduce(np.ones(3), ReduceOp.SUM, NOW), 2)
            assert future.result(SECONDS)

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


class TestErrors:
    def test_calls_that_do_not_fit_together(self, world):
        def run(rank: int) -> None:
            array = np.ones(3 + (rank == 1))
            with pytest.raises(CollectiveMismatchError, match="here and there") as caught:
                world[rank].world.all_reduce(array, ReduceOp.SUM, NOW._replace(details=lambda: "here and there"))
            assert caught.value.ranks
            assert (array == 1).all()
            world[rank].world.all_reduce(array[:3], ReduceOp.SUM, NOW)
            assert (array[:3] == 3).all()

        everywhere(run, 3)

    def test_who_stays_away_is_named(self, world):
        def run(rank: int) -> None:
            if rank == 1:
                return
            with pytest.raises((CollectiveTimeoutError, GroupAbortedError), match=r"rank 1 \(") as caught:
                world[rank].world.all_reduce(np.ones(3), ReduceOp.SUM, Options(0.5))
            assert caught.value.ranks == (1,)
            assert world[rank].world.failure is not None

        everywhere(run, 3)

    def test_an_abort_reaches_everyone(self, world):
        def run(rank: int) -> None:
            if rank == 1:
                time.sleep(0.2)
                world[rank].world.abort(KeyboardInterrupt())
            with pytest.raises(GroupAbortedError, match=r"rank 1 .* gave up .*: KeyboardInterrupt"):
                world[rank].world.barrier(NOW)

        everywhere(run, 3)

    def test_a_process_that_dies_is_a_rank_that_failed(self, world):
        def run(rank: int) -> None:
            if rank == 1:
                time.sleep(0.2)
                world[rank]._client._control.close()  # as the kernel does
                return
            with pytest.raises(RankFailedError, match=r"rank 1 .* failed \(its process \(pid .* without a goodbye"):
                world[rank].world.all_reduce(np.ones(3), ReduceOp.SUM, NOW)

        everywhere(run, 3)


class TestTheStore:
    def test_commands(self, world):
        def run(rank: int) -> None:
            place = world[rank].blocking_store()
            place.execute(commands.Set(f"key/{rank}", b"value"))
            assert place.execute(commands.Get(f"key/{(rank + 1) % 3}", SECONDS)) == b"value"
            place.execute(commands.Add("sum", 2))
            with pytest.raises(KeyNotFoundError):
                place.execute(commands.Get("nobody", 0.2))
            world[rank].world.barrier(NOW)
            assert place.execute(commands.Get("sum", SECONDS)) == b"6"
            place.close()

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

    def test_one_at_a_time(self, standalones):
        attached = attach(standalones[0], 0, 1, job=next(_jobs))
        try:
            with pytest.raises(AgentTakenError, match="is taken"):
                attach(standalones[0], 0, 1, job="another")
        finally:
            attached.close()

    def test_a_join_that_is_too_late_says_who_is_missing(self, standalones):
        with pytest.raises(JoinTimeoutError) as caught:
            attach(standalones[0], 0, 2, job=next(_jobs), timeout=1.0)
        assert caught.value.ranks == (1,)

    def test_a_process_that_goes_while_it_joins_frees_the_agent(self, standalones):
        agent = standalones[0]
        streams: list[Any] = []
        connect = AgentDialer.connect

        def recorded(self: AgentDialer, deadline: Any) -> Any:
            streams.append(connect(self, deadline))
            return streams[-1]

        patch = pytest.MonkeyPatch()
        patch.setattr(AgentDialer, "connect", recorded)
        future = in_thread(lambda: attach(agent, 0, 2, job=next(_jobs)))
        wait_until(lambda: agent.leases.lease, "the lease", SECONDS)
        patch.undo()
        streams[0].shutdown()
        with pytest.raises(DistNetworkError, match="went as this process joined"):
            future.result(SECONDS)
        wait_until(lambda: agent.leases.lease is None, "the lease to end", SECONDS)

    def test_the_agent_may_end_it(self, standalones):
        agent = standalones[0]
        attached = attach(agent, 0, 1, job=next(_jobs))
        assert agent.leases.release(agent.leases.lease.id, "somebody said so")
        with pytest.raises((LeaseEndedError, GroupAbortedError, RankFailedError)):
            attached.new_group([0], SECONDS)
        attached.close()

    @pytest.mark.parametrize("nearby", [True, False])
    def test_another_token_is_refused(self, standalones, nearby):
        with pytest.raises(AuthenticationError, match="RANKMESH_TOKEN"):
            attach(standalones[0], 0, 1, job=next(_jobs), nearby=nearby, token="another")
        assert standalones[0].leases.lease is None

    def test_an_agent_that_is_another_one_is_not_taken(self, standalones):
        other = offer(standalones[0], nearby=False)
        other.id = "another"
        with pytest.raises(DistNetworkError, match="another agent than the one that was offered"):
            attach(other, 0, 1, job=next(_jobs))

    def test_one_that_cannot_be_reached_is_named(self, standalones):
        gone = offer(standalones[0], nearby=False)
        gone.urls = ["http://127.0.0.1:1"]
        with pytest.raises(DistNetworkError, match=r"'agent-0' .* cannot be reached: http://127.0.0.1:1: "):
            attach(gone, 0, 1, job=next(_jobs))


class TestWhatTheAgentKnows:
    def test_calls_over_lent_memory(self, standalones):
        job = next(_jobs)
        made = everywhere(lambda rank: attach(standalones[rank], rank, 2, job=job), 2)

        def run(rank: int) -> None:
            for _ in range(3):
                made[rank].world.all_reduce(np.ones(100), ReduceOp.SUM, NOW)
            made[rank]._reporter.send()
            current = standalones[rank].agent
            assert current is not None
            group = next(group for group in current.groups() if group.name == "world")
            assert (group.seq, group.last, group.medium) == (3, "all_reduce", "shm")
            assert group.bytes == 3 * 800
            records = current._recorder.records("world")
            assert [record.op for record in records if record.op == "all_reduce"] == ["all_reduce"] * 3

        everywhere(run, 2)
        for agent in made:
            agent.close()
