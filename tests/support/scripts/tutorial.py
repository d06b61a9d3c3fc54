"""The programs of torch's tutorial on writing distributed applications, in processes that it starts itself."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def blocking(rank, size):
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor=tensor, src=0)
    print("blocking: rank", rank, "has data", tensor[0], flush=True)


def nonblocking(rank, size):
    tensor = torch.zeros(1)
    req = None
    if rank == 0:
        tensor += 1
        req = dist.isend(tensor=tensor, dst=1)
    elif rank == 1:
        req = dist.irecv(tensor=tensor, src=0)
    if req is not None:
        req.wait()
    print("nonblocking: rank", rank, "has data", tensor[0], flush=True)


def simple_all_reduce(rank, size):
    group = dist.new_group([0, 1])
    tensor = torch.ones(1)
    if rank < 2:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    print("all_reduce: rank", rank, "has data", tensor[0], flush=True)


def ring_all_reduce(send):
    """Add up a tensor over all ranks, talking to the neighbours only."""
    rank, size = dist.get_rank(), dist.get_world_size()
    send_buff, recv_buff, accum = send.clone(), send.clone(), send.clone()
    left, right = (rank - 1 + size) % size, (rank + 1) % size
    for i in range(size - 1):
        if i % 2 == 0:
            send_req = dist.isend(send_buff, right)
            dist.recv(recv_buff, left)
            accum[:] += recv_buff[:]
        else:
            send_req = dist.isend(recv_buff, right)
            dist.recv(send_buff, left)
            accum[:] += send_buff[:]
        send_req.wait()
    return accum


def ring(rank, size):
    tensor = torch.arange(4.0).reshape(2, 2) + rank
    accum = ring_all_reduce(tensor)
    dist.all_reduce(tensor)
    print("ring: rank", rank, "has data", accum.tolist(), torch.equal(accum, tensor), flush=True)


def init_process(rank, size, port, backend="gloo"):
    """Initialize the distributed environment."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group(backend, rank=rank, world_size=size)
    for fn in (blocking, nonblocking, simple_all_reduce, ring):
        fn(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    size = int(sys.argv[2])
    mp.spawn(init_process, args=(size, sys.argv[3]), nprocs=size)
