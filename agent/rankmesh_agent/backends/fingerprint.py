"""How ranks compare their calls over messages, and say it when these are not the same."""

from __future__ import annotations

import json
from typing import NoReturn

from rankmesh_agent.backends.base import CallContext
from rankmesh_agent.progress.message_link import VerifiedLink
from rankmesh_agent.transports.slots import CallMismatchError
from rankmesh_agent.wire.errors import CollectiveMismatchError

_NOTE = 4096
"""Characters of a rank's note that the others are told."""


def verify(link: VerifiedLink, watch: CallContext) -> None:
    """Wait until all ranks are at the call that ``watch`` watches.

    Raises:
        CollectiveMismatchError: they did not make the same call; says who made which.
        DistBackendError: a rank is missing, or failed.
    """
    try:
        link.begin(watch.seq, watch.call.fingerprint, watch.wait)
        link.all_exchange()
    except CallMismatchError:
        raise_mismatch(link, watch)


def raise_mismatch(link: VerifiedLink, watch: CallContext) -> NoReturn:
    """Ask everyone what they called, and say it.

    Raises:
        CollectiveMismatchError: always.
    """
    call = watch.call
    mine = json.dumps([str(call), watch.details()[:_NOTE]]).encode()
    link.begin(watch.seq, 0, watch.wait)
    said = [json.loads(bytes(payload)) for payload in link.exchange_descriptions(mine)]
    table = "; ".join(
        f"rank {rank}: {words}{f' ({note})' if note else ''}"
        for rank, (words, note) in zip(watch.global_ranks, said, strict=True)
    )
    raise CollectiveMismatchError(
        f"the ranks did not make the same call as #{watch.seq} of the group: {table}. No array was changed; find "
        "the rank that took another branch, or whose array has another shape or dtype",
        ranks=[rank for rank, (words, _) in zip(watch.global_ranks, said, strict=True) if words != str(call)],
        op=call.name,
        seq=watch.seq,
    )
