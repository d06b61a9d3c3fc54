"""Tutorial 4.5: an all-reduce of our own, round a ring, checked against ``dist.all_reduce``."""

import numpy as np
from template import launch

import rankmesh as dist


def ring_all_reduce(array: np.ndarray) -> None:
    """Replace the array by its sum over all ranks, with messages to the neighbours only.

    The array is cut into as many chunks as there are ranks. In the first half each chunk travels once round the ring
    and is added to on its way; in the second half the finished chunks travel once more. Each rank sends
    2 (size - 1) / size of the array's bytes, however many ranks there are.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = np.array_split(array, size)  # views: writing to a chunk writes to the array
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        incoming += shift(outgoing, np.empty_like(incoming))
    for step in range(size - 1):
        shift(chunks[(rank - step + 1) % size], chunks[(rank - step) % size])


def shift(outgoing: np.ndarray, incoming: np.ndarray) -> np.ndarray:
    """Send one array to the right neighbour while receiving another from the left one; return the received one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    requests = [
        dist.isend(outgoing, dst=(rank + 1) % size),
        dist.irecv(incoming, src=(rank - 1) % size),
    ]
    for request in requests:
        request.wait()
    return incoming


def run(rank: int, size: int) -> None:
    """Add up random numbers both ways. 1001 of them, so that the chunks are not equally long."""
    ours = np.random.default_rng(seed=rank).random(1001)
    theirs = ours.copy()
    ring_all_reduce(ours)
    dist.all_reduce(theirs)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    print("Rank ", rank, " agrees with dist.all_reduce, sum of all ", f"{ours.sum():.6f}")


if __name__ == "__main__":
    launch(run, size=4)
