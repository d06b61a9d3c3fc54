"""A parameter server: rank 0 takes gradients from whichever worker has some, and answers with the weights."""

import torch
import torch.distributed as dist

STEPS, WIDTH = 5, 4
GRADIENT, WEIGHTS = 1, 2


def serve(workers):
    weights, steps = torch.zeros(WIDTH, dtype=torch.int64), dict.fromkeys(workers, 0)
    while sum(steps.values()) < STEPS * len(workers):
        message = torch.zeros(WIDTH + 1, dtype=torch.int64)
        worker = dist.recv(message, tag=GRADIENT)
        assert message[0] == worker
        weights += message[1:]
        steps[worker] += 1
        dist.send(weights, dst=worker, tag=WEIGHTS)
    print(f"server: weights {weights.tolist()} after steps {steps}", flush=True)
    return weights


def work(rank):
    weights = torch.zeros(WIDTH, dtype=torch.int64)
    for step in range(STEPS):
        gradient = torch.arange(WIDTH) * rank + step
        dist.send(torch.cat([torch.tensor([rank]), gradient]), dst=0, tag=GRADIENT)
        before = weights.clone()
        sender = dist.recv(weights, src=0, tag=WEIGHTS)
        print(f"worker {rank}: step {step} answered by {sender}, grew: {bool((weights >= before).all())}", flush=True)


def main():
    dist.init_process_group("gloo", init_method="env://")
    rank, size = dist.get_rank(), dist.get_world_size()
    weights = torch.zeros(WIDTH, dtype=torch.int64)
    if rank == 0:
        weights = serve(range(1, size))
    else:
        work(rank)
    dist.broadcast(weights, src=0)
    print(f"rank {rank}: ends with {weights.tolist()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
