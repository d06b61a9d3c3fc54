"""Tutorial 2.1: blocking point-to-point communication."""

import numpy as np
from template import launch

import rankmesh as dist


def run(rank: int, size: int) -> None:
    """Rank 0 sends an array of one number to rank 1."""
    tensor = np.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    else:
        dist.recv(tensor=tensor, src=0)
    print("Rank ", rank, " has data ", tensor[0])


if __name__ == "__main__":
    launch(run, size=2)
