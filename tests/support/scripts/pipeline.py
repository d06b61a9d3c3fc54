"""A pipeline round a ring: every rank is a layer, micro-batches go from one to the next, and back to rank 0."""

from datetime import timedelta

import torch
import torch.distributed as dist

BATCHES, ROWS, WIDTH = 6, 4, 8


def main():
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    layer = torch.eye(WIDTH).roll(rank + 1, 0) * (rank + 2)

    outgoing, arriving = [], []
    if rank == 0:
        batches = [torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH) + number for number in range(BATCHES)]
        for number, batch in enumerate(batches):
            outgoing.append(dist.isend(batch @ layer, dst=after, tag=number))
        for number in range(BATCHES):
            done = torch.empty(ROWS, WIDTH)
            arriving.append((done, dist.irecv(done, src=before, tag=number)))
        for number, (done, request) in reversed(list(enumerate(arriving))):
            request.wait()
            print(f"batch {number}: sum {done.sum().item()}, first row {done[0].tolist()}", flush=True)
    else:
        buffers = [torch.empty(ROWS, WIDTH) for _ in range(BATCHES)]
        arriving = [dist.irecv(buffer, src=before, tag=number) for number, buffer in enumerate(buffers)]
        for number, (buffer, request) in enumerate(zip(buffers, arriving, strict=True)):
            request.wait()
            outgoing.append(dist.isend(torch.relu(buffer @ layer - number), dst=after, tag=number))
    for request in outgoing:
        request.wait()
    print(f"rank {rank}: passed on {len(outgoing)} batches", flush=True)

    # The same backwards, in batches of one send and one receive.
    token = torch.tensor([float(rank)])
    for _ in range(size):
        got = torch.empty(1)
        ops = [dist.P2POp(dist.isend, token, before), dist.P2POp(dist.irecv, got, after)]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        token = got
    print(f"rank {rank}: its token came back: {token.item() == rank}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
