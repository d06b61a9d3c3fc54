"""Tutorial 3.1: a collective in a group. A third rank, outside of the group, keeps its data."""

import numpy as np
from template import launch

import rankmesh as dist


def run(rank: int, size: int) -> None:
    """Ranks 0 and 1 add up their ones. Every rank calls new_group, also those outside the group."""
    group = dist.new_group([0, 1])
    tensor = np.ones(1)
    if rank in (0, 1):
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    print("Rank ", rank, " has data ", tensor[0])


if __name__ == "__main__":
    launch(run, size=3)
