"""split_group for torch groups over the mesh; torch's own function requires an accelerator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as c10d
from torch.distributed.constants import default_pg_timeout

from rankmesh._session.groups import check_split
from rankmesh.torch._group import rankmesh_group

_splits: Counter[str] = Counter()
"""Number of groups made so far, by members. It is part of a group's name, so that no name is used twice."""


def split_group(
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Any:
    """Split a group's members into torch groups; each member calls it and gets the group it is in.

    Args:
        parent_pg: a torch process group of backend ``rankmesh``, the default one if None.
        split_ranks: the members of each new group, as ranks in ``parent_pg``; the new ranks are in their order there.
        timeout: default timeout of the new group's calls; torch's default if None.
        pg_options, group_desc: as for torch.distributed.new_group.

    Returns:
        The group this rank is in, None if it is in none.

    Raises:
        ValueError: ``split_ranks`` is empty or has an empty list, a rank twice or one out of range; or this process is
            not in ``parent_pg``.

    Source: torch.distributed.split_group
    """
    parent = rankmesh_group(parent_pg)
    if parent is None:
        raise ValueError("this process is not a member of the group")
    parent_ranks = c10d.get_process_group_ranks(parent)
    split = check_split(split_ranks, "split_ranks", len(parent_ranks), "the ranks of parent_pg")
    mine = next((ranks for ranks in split if parent.rank() in ranks), None)
    if mine is None:
        return None
    ranks = [parent_ranks[rank] for rank in sorted(mine)]
    members = "_".join(map(str, ranks))
    _splits[members] += 1
    # torch.distributed.new_group names a group by the number of groups there are, a name that an older one may have.
    torchs = c10d.distributed_c10d
    group, _ = torchs._new_process_group_helper(
        len(ranks),
        ranks.index(c10d.get_rank()),
        ranks,
        c10d.Backend("rankmesh"),
        torchs._get_default_store(),
        f"rankmesh/{members}/{_splits[members]}",
        pg_options,
        timeout=timeout or default_pg_timeout,
        group_desc=group_desc,
    )
    torchs._world.pg_group_ranks[group] = {global_rank: rank for rank, global_rank in enumerate(ranks)}
    return group
