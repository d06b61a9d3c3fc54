"""split_group for torch groups over the mesh: torch's own function needs an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as c10d

from rankmesh._session.groups import check_split
from rankmesh.torch._group import rankmesh_group


def split_group(
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Any:
    """Make torch groups out of a group's members; each member calls it and gets the one it is in.

    Args:
        parent_pg: a torch process group of backend ``rankmesh``, the default one if None.
        split_ranks: the ranks of each new group, numbered as in ``parent_pg``, which also gives their order.
        timeout: default time an operation of the new group may take; torch's default if None.
        pg_options, group_desc: as for torch.distributed.new_group.

    Returns:
        The group this rank is in, None if it is in none.

    Raises:
        ValueError: there is none, one is empty, a rank is in two or out of range, or this process is not in
            ``parent_pg``.

    Source: torch.distributed.split_group
    """
    group = rankmesh_group(parent_pg)
    if group is None:
        raise ValueError("this process is not a member of the group")
    parent = c10d.get_process_group_ranks(parent_pg)
    split = check_split(split_ranks, "split_ranks", len(parent), "the ranks of parent_pg")
    mine = next((ranks for ranks in split if group.rank() in ranks), None)
    if mine is None:
        return None
    return c10d.new_group(
        [parent[rank] for rank in sorted(mine)],
        timeout=timeout,
        backend="rankmesh",
        pg_options=pg_options,
        use_local_synchronization=True,
        group_desc=group_desc,
    )
