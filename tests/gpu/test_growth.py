"""Many calls on arrays on GPUs leave nothing behind: no memory, events, mappings, keys, threads or descriptors."""

from __future__ import annotations

from typing import Any

import pytest
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes


def calls(me: Me, backend: str | None, rounds: int) -> None:
    import cupy

    me.init(timeout=60, backend=backend)
    pool = cupy.get_default_memory_pool()
    kept = cupy.full(500, float(me.rank))

    def some(turn: int) -> None:
        array = cupy.full(100 + turn % 7, 1.0)
        dist.all_reduce(array)
        works = [dist.all_reduce(cupy.ones(64), async_op=True), dist.broadcast(kept, 0, async_op=True)]
        outputs = [cupy.zeros(array.size) for _ in range(me.size)]
        dist.all_gather(outputs, array)
        dist.all_reduce(cupy.ones((8, 8))[:, ::2])
        dist.all_to_all_single(cupy.zeros(me.size), cupy.ones(me.size))
        if turn % 10 == 0:
            if me.rank == 0:
                dist.send(array, 1)
            elif me.rank == 1:
                dist.recv(array, 0)
        for work in works:
            work.wait()
        if turn % 10 == 0:
            kept.get()  # the host waits for the GPU now and then, as in any program

    def settled() -> dict[str, Any]:
        dist.barrier()
        cupy.cuda.runtime.deviceSynchronize()
        dist.barrier()
        threads, descriptors = me.resources()
        choice = dist.group.WORLD._gpu
        engine = None if choice is None else choice._collectives
        return {
            "memory": pool.used_bytes(),
            "total": pool.total_bytes(),
            "threads": sum(name.startswith("rankmesh") for name in threads),
            "events": 0 if engine is None else sum(map(len, engine._events._free.values())),
            "mapped": len(getattr(getattr(engine, "gpu_backend", None), "_mapped", ())),
            # A rank may say, once, that a call takes long: on a busy machine one does.
            "keys": sorted(key for key in dist.get_default_store().list_keys() if "/slow/" not in key),
            "descriptors": sum(descriptors.values()),
        }

    for turn in range(30):
        some(turn)
    before = settled()
    for turn in range(rounds):
        some(turn)
    after = settled()
    dist.barrier()  # who ends removes its keys
    me.report(before=before, after=after, value=float(kept[0].get()))
    dist.destroy_process_group()


@pytest.mark.parametrize("engine", ["nccl", "cuda-ipc", "staged"])
def test_hundreds_of_calls_leave_nothing_behind(ranks: Ranks, machine: Any, engine: str) -> None:
    """Six calls a round; what is made as it is needed first may be there later than before the rounds."""
    environment, backend = machine.engine(engine, 2, delay=0.0)
    for rank in ranks.run(calls, 2, env=environment, backend=backend, rounds=170 if machine.thorough else 50):
        before, after = rank.reported["before"], rank.reported["after"]
        for name in ("memory", "keys"):
            assert after[name] == before[name], (name, before, after)
        for name, room in ("total", 8 << 20), ("events", 200), ("mapped", 8), ("threads", 4), ("descriptors", 16):
            assert after[name] <= before[name] + room, (name, before, after)
