"""Something of everything: the world, groups, operations, objects, stores, asynchronous calls, and a wrong call."""

import os
import sys
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass
class Config:
    """What a user would pass round: an object of a class of the script."""

    name: str
    layers: list = field(default_factory=list)


def main():
    assert dist.is_available()
    assert not dist.is_initialized()
    dist.init_process_group(backend=dist.Backend.GLOO, timeout=timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size == int(os.environ["WORLD_SIZE"])

    def say(*words):
        print(f"rank {rank}:", *words, flush=True)

    say("world", dist.get_rank(dist.group.WORLD), dist.get_world_size(dist.group.WORLD), dist.is_initialized())
    say("ranks", dist.get_process_group_ranks(dist.group.WORLD))

    # Every operation.
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        tensor = torch.tensor([rank + 1, 6])
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        say(name, tensor.tolist())

    # Groups.
    pair = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        tensor = torch.full((2,), float(rank))
        dist.broadcast(tensor, src=size - 1, group=pair)
        say("pair", dist.get_rank(pair), tensor.tolist(), dist.get_global_rank(pair, 1))
        dist.destroy_process_group(pair)
    else:
        say("pair", dist.get_rank(pair), pair == dist.GroupMember.NON_GROUP_MEMBER)

    # Objects.
    configs = [Config("from 0", [1, 2]), {"lr": 0.1}, None] if rank == 0 else [None] * 3
    dist.broadcast_object_list(configs, src=0)
    say("broadcast", configs)
    everyone = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "tensor": torch.arange(rank)})
    say("gathered", everyone)
    mine = [None]
    dist.scatter_object_list(mine, [f"for {each}" for each in range(size)] if rank == 0 else None, src=0)
    say("scattered", mine)

    # Stores.
    store = dist.FileStore(os.path.join(sys.argv[1], "store"), size)
    store.set(f"key-{rank}", f"value of {rank}")
    store.wait([f"key-{each}" for each in range(size)], timedelta(seconds=20))
    say("store", [store.get(f"key-{each}") for each in range(size)])
    prefixed = dist.PrefixStore("prefix", dist.HashStore())
    prefixed.set("counter", "40")
    say("counter", prefixed.add("counter", 2), prefixed.get("counter"))

    # Asynchronous calls.
    tensors = [torch.full((3,), float(rank + each)) for each in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    say("works", [tensor[0].item() for tensor in tensors], all(work.is_completed() for work in works))
    output = torch.zeros(size, dtype=torch.int64)
    dist.all_to_all_single(output, torch.arange(size) + 10 * rank)
    say("all_to_all", output.tolist())
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    say("future", future.then(lambda done: done.value()[0].sum().item()).wait())

    # A wrong call.
    try:
        dist.gather(torch.ones(1), [torch.ones(1)] if rank else None, dst=0)
    except ValueError as error:
        say("wrong", type(error).__name__)
    dist.monitored_barrier()
    dist.destroy_process_group()
    say("end", dist.is_initialized())


if __name__ == "__main__":
    main()
