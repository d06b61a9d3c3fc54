"""Tutorial 2.2: non-blocking point-to-point communication."""

import numpy as np
from template import launch

import rankmesh as dist


def run(rank: int, size: int) -> None:
    """Rank 0 sends to rank 1; both may do something else until they wait, but must not touch the array."""
    tensor = np.zeros(1)
    if rank == 0:
        tensor += 1
        request = dist.isend(tensor=tensor, dst=1)
        print("Rank 0 started sending")
    else:
        request = dist.irecv(tensor=tensor, src=0)
        print("Rank 1 started receiving")
    request.wait()
    print("Rank ", rank, " has data ", tensor[0])


if __name__ == "__main__":
    launch(run, size=2)
