"""DistributedSampler: the indices of each rank's samples."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np

from rankmesh._session.init import is_initialized
from rankmesh._session.ranks import get_rank, get_world_size

_SEEDS = 1 << 32
"""Number of the Mersenne Twister's seeds: torch uses the lower bits of a seed, of a negative one too."""


class DistributedSampler:
    """Shards the indices of a dataset over ranks; all shards are equally long.

    All ranks compute the same order of an epoch, extended with its own beginning (or cut, with ``drop_last``) to a
    multiple of ``num_replicas``; rank r takes positions r, r + num_replicas, and so on. The indices are torch's, also
    when shuffled, below 2 ** 32 // 20 samples; above, torch uses another shuffle.

    A sampler is iterable and has a length: use it in a loop, or as the ``sampler`` of a torch DataLoader. Without a
    ``set_epoch`` before each epoch, every epoch has the same order.

    Args:
        dataset: anything with a length, the same on all ranks.
        num_replicas: number of ranks that share the dataset; the world size by default.
        rank: this rank; the rank in the world by default.
        shuffle: use a new random order every epoch instead of 0, 1, 2, …
        seed: of the orders; must be the same on all ranks.
        drop_last: leave out the last few samples instead of repeating the first few.

    Attributes:
        num_samples: length of a shard, which is ``len(sampler)``.
        total_size: length of all shards together.
        epoch: as last set.

    Raises:
        ValueError: ``rank`` is not one of 0 to ``num_replicas - 1``, or one of them is left out before
            init_process_group.
        TypeError: ``dataset`` has no length.

    Source: https://pytorch.org/docs/2.1/data.html#torch.utils.data.distributed.DistributedSampler
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if (num_replicas is None or rank is None) and not is_initialized():
            raise ValueError("there is no world yet: call init_process_group() first, or pass num_replicas and rank")
        self.num_replicas = get_world_size() if num_replicas is None else num_replicas
        self.rank = get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(
                f"rank {self.rank} is out of range: with num_replicas={self.num_replicas}, "
                f"ranks are 0 to {self.num_replicas - 1}"
            )
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._length = len(dataset)
        whole, rest = divmod(self._length, self.num_replicas)
        self.num_samples = whole if drop_last else whole + bool(rest)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        if len(self.dataset) != self._length:
            raise RuntimeError(
                f"the dataset had {self._length} samples when its DistributedSampler was made, and has "
                f"{len(self.dataset)} now: make a new one, on all ranks"
            )
        order = _permutation(self._length, self.seed + self.epoch) if self.shuffle else range(self._length)
        padded = np.resize(order, self.total_size)  # repeats the order from its beginning, or cuts it
        indices: list[int] = padded[self.rank :: self.num_replicas].tolist()
        return iter(indices)

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration.

        Args:
            epoch: number of the epoch, the same on all ranks.
        """
        self.epoch = epoch


def _permutation(length: int, seed: int) -> list[int]:
    """Return the numbers below ``length`` in the order that torch.randperm gives them with this seed.

    Fisher-Yates shuffle: each position is swapped with itself or a later one, chosen by the Mersenne Twister's next 32
    bits modulo the number of positions left. RandomState is that generator, and NumPy keeps its stream stable.
    """
    places = np.arange(max(length - 1, 0))
    drawn = np.random.RandomState(seed % _SEEDS).randint(1 << 32, size=places.size, dtype=np.uint32)
    others = places + drawn % (length - places)
    order = list(range(length))
    for place, other in enumerate(others.tolist()):
        order[place], order[other] = order[other], order[place]
    return order
