"""Train with torchft: one of two replicas dies halfway, and the other goes on without it.

python examples/integrations/torchft_replicas.py
"""

from __future__ import annotations

import os
from datetime import timedelta
from multiprocessing.synchronize import Barrier

import torch
import torch.distributed as dist
import torchft
from task import BATCH, RATE, SAMPLES, dataset, digest, loss, network, parser
from torch.nn.functional import mse_loss
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupWrapper

import rankmesh.torch

REPLICAS = 2
STEPS, STEP_OF_DEATH = 80, 40


class ProcessGroupRankMesh(ProcessGroupWrapper):
    """Group of the replicas, made anew for each quorum."""

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        return rankmesh.torch.new_process_group(store, rank, world_size, self._timeout)

    def abort(self, errored: bool = True) -> None:
        group = self._pg
        super().abort(errored)
        if group is not None:
            group.shutdown()

    def getBackendName(self) -> str:  # noqa: N802
        return "torchft-rankmesh"


GROUPS = {"rankmesh": ProcessGroupRankMesh, "gloo": torchft.ProcessGroupGloo}


def train(replica: int, backend: str, lighthouse: str, together: Barrier) -> None:
    """Train as a replica of one rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    group = GROUPS[backend](timeout=timedelta(seconds=60))
    manager = torchft.Manager(
        pg=group,
        min_replica_size=1,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            optimizer.load_state_dict(state["optimizer"]),
        ),
        replica_id=f"replica-{replica}",
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    wrapped = torchft.DistributedDataParallel(manager, model)
    steps = torchft.Optimizer(manager, optimizer)
    inputs, targets = dataset().tensors
    together.wait()  # the first quorum has all replicas that the lighthouse knows
    while (step := manager.current_step()) < STEPS:
        if step == STEP_OF_DEATH and manager.num_participants() == REPLICAS:
            together.wait()  # both have finished the step before
            if replica == 1:
                os._exit(0)
        steps.zero_grad()
        first = (step * REPLICAS + replica) * BATCH % SAMPLES
        mine = slice(first, first + BATCH)
        mse_loss(wrapped(inputs[mine]), targets[mine]).backward()
        steps.step()
    alive = manager.num_participants()
    print(f"{group.getBackendName()}, {alive} of {REPLICAS} replicas: loss {loss(model):.3f}, weights {digest(model)}")
    manager.shutdown(wait=False)
    group.abort(errored=False)


if __name__ == "__main__":
    backend = parser().parse_args().backend
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=30_000, heartbeat_timeout_ms=1000)
    together = torch.multiprocessing.get_context("spawn").Barrier(REPLICAS)
    torch.multiprocessing.spawn(train, (backend, lighthouse.address(), together), nprocs=REPLICAS)
    lighthouse.shutdown()
