"""Workers of a DataLoader, forked from a rank that trains over the mesh."""

from __future__ import annotations

import faulthandler
import os
import threading

import pytest
import torch
import torch.distributed as c10d
from support.processes import Me, on_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

FORKS = int(os.environ.get("RANKMESH_TEST_FORKS", "200"))
_WORKERS = 2


class Calling(Dataset[float]):
    """Its items are made with a call of the parent's group."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        with pytest.raises(RuntimeError, match=f"process {os.getppid()}, which has forked this one"):
            c10d.all_reduce(torch.ones(3))
        return float(index)


@on_ranks(1)
def test_a_worker_that_calls_gets_an_error(me: Me) -> None:
    c10d.init_process_group("rankmesh", init_method=f"file://{me.folder}/rendezvous", rank=0, world_size=1)
    loader = DataLoader(Calling(), num_workers=1, multiprocessing_context="fork", timeout=60)
    assert [batch.item() for batch in loader] == [0, 1]
    c10d.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("epochs", [FORKS // 10 // _WORKERS])
@on_ranks(2, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_workers_of_a_busy_rank(me: Me, epochs: int) -> None:
    faulthandler.enable()
    torch.manual_seed(0)
    c10d.init_process_group("rankmesh", init_method=f"file://{me.folder}/rendezvous", rank=me.rank, world_size=me.size)
    busy = c10d.new_group()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(
        TensorDataset(torch.arange(64.0).reshape(8, 8)),
        batch_size=2,
        num_workers=_WORKERS,
        multiprocessing_context="fork",
        timeout=60,
    )
    ending = threading.Event()
    results: list[bool] = []

    def keep_calling() -> None:
        state = torch.zeros(2)
        while not state[1]:
            state[0], state[1] = 1, ending.is_set()
            works = [c10d.all_reduce(torch.ones(70_000), group=busy, async_op=True) for _ in range(2)]
            c10d.all_reduce(state, group=busy)
            for work in works:
                work.wait()
            results.append(state[0].item() == me.size)

    thread = threading.Thread(target=keep_calling, daemon=True)
    thread.start()
    for _ in range(epochs):
        seen = 0
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch * (me.rank + 1) / 64).sum().backward()
            optimizer.step()
            seen += len(batch)
        assert seen == 8
    ending.set()
    thread.join()
    assert all(results)
    weights = [torch.zeros(1, 8) for _ in range(me.size)]
    c10d.all_gather(weights, model.module.weight.detach())
    assert weights[0].equal(weights[1])
    c10d.destroy_process_group()
