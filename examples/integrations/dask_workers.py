"""Train on the workers of a Dask cluster that runs already: one rank per worker.

dask scheduler --host 127.0.0.1 --port 8786 &
dask worker tcp://127.0.0.1:8786 --nworkers 2 --nthreads 1 &
python examples/integrations/dask_workers.py tcp://127.0.0.1:8786
"""

from __future__ import annotations

import uuid
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist
from distributed import Client, Variable, get_worker
from task import network, parser, summary, train
from torch.nn.parallel import DistributedDataParallel


def join(backend: str, rank: int, size: int, job: str) -> None:
    """Make this worker a rank. The worker of rank 0 hosts torch's store, at a port that it publishes in the cluster."""
    address = Variable(job)
    if rank == 0:
        host = urlsplit(get_worker().address).hostname
        store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
        address.set([host, store.port])
    else:
        store = dist.TCPStore(*address.get(timeout=60), size, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def run(*place: object) -> str:
    """Join, train, and leave the worker to other tasks."""
    join(*place)
    try:
        model = DistributedDataParallel(network())
        train(model)
        return summary(model.module)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    options = parser()
    options.add_argument("scheduler", help="the scheduler's address")
    arguments = options.parse_args()
    client = Client(arguments.scheduler)
    client.wait_for_workers(2)
    client.upload_file(str(Path(__file__).with_name("task.py")))
    workers = sorted(client.scheduler_info()["workers"])[:2]
    job = f"rendezvous-{uuid.uuid4()}"
    ranks = [
        client.submit(run, arguments.backend, rank, len(workers), job, workers=worker, pure=False)
        for rank, worker in enumerate(workers)
    ]
    print(client.gather(ranks)[0])
