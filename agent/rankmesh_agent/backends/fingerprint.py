"""Comparison of the ranks' calls over messages, and the error when they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from rankmesh_agent.backends.base import CallContext
from rankmesh_agent.collectives.link import FEW_RANKS
from rankmesh_agent.net.callers import call_site
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.progress.status import DIFFERENT
from rankmesh_agent.shared_memory.slots import CallMismatchError
from rankmesh_agent.wire.errors import CollectiveMismatchError
from rankmesh_agent.wire.ranges import ranges

_MAX_DETAILS = 4096
"""Characters of a rank's details that the other ranks receive."""
_SEPARATOR = "\0"
"""Between a rank's call, the line that makes it, and its details."""
_UNKNOWN = "a call that does not fit into the report", "", ""
"""Stands for the description of a rank in a large group with many different calls."""


def verify(link: MessageLink, context: CallContext) -> None:
    """Wait until all ranks have arrived at the call in ``context``.

    Raises:
        CollectiveMismatchError: the ranks made different calls; the message lists each rank's.
        DistBackendError: a rank is missing, or failed.
    """
    try:
        link.begin(context.seq, context.call.fingerprint, context.wait)
        link.arrive()
    except CallMismatchError:
        raise_mismatch(link, context)


def raise_mismatch(link: MessageLink, context: CallContext) -> NoReturn:
    """Exchange the descriptions of all ranks' calls, and raise the error that lists them."""
    mine = _SEPARATOR.join([str(context.call), call_site(), context.describe()[:_MAX_DETAILS]])
    link.begin(context.seq, DIFFERENT, context.wait)
    calls = [tuple(text.split(_SEPARATOR, 2)) for text in link.exchange_descriptions(mine)]
    raise mismatch_error(context, [call if len(call) == 3 else _UNKNOWN for call in calls]) from None


def mismatch_error(context: CallContext, calls: Sequence[Sequence[str]]) -> CollectiveMismatchError:
    """Return the error that lists the ranks' calls, and names the ranks whose calls differ from this rank's.

    Args:
        calls: by group rank, the rank's call, the line that makes it, where that is known, and its details.
    """
    ranked = list(zip(context.global_ranks, calls, strict=True))
    table = call_table({rank: f"{call} ({details})" if details else call for rank, (call, _, details) in ranked})
    others = [rank for rank, (call, _, _) in ranked if call != str(context.call)]
    if not others:
        mine = context.describe()[:_MAX_DETAILS]
        others = [rank for rank, (_, _, details) in ranked if details != mine]
        if len(others) == len(ranked) - 1 > 1:  # the details of a correct call may differ from rank to rank, too
            others = []
    return CollectiveMismatchError(
        f"the ranks did not make the same call as #{context.seq} of the group: {table}. No array was changed; find "
        f"the rank that took another branch, or whose array has another shape or dtype{_lines(ranked)}",
        ranks=others,
        op=context.call.name,
        seq=context.seq,
    )


def _lines(ranked: Sequence[tuple[int, Sequence[str]]]) -> str:
    """Return the lines that make the calls as the end of a sentence, those of the fewest ranks first."""
    found: dict[str, list[int]] = {}
    for rank, (call, site, _) in ranked:
        if site:
            found.setdefault(f"{call} at {site}", []).append(rank)
    texts = [
        f"ranks {', '.join(ranges(ranks))} call {text}" if len(ranks) > 1 else f"rank {ranks[0]} calls {text}"
        for text, ranks in sorted(found.items(), key=lambda item: len(item[1]))
    ]
    return f": {'; '.join(texts)}" if texts else ""


def call_table(calls: Mapping[int, str]) -> str:
    """Return the ranks' calls, by global rank, as text for an error; of many ranks, equal calls once."""
    if len(calls) <= FEW_RANKS:
        return "; ".join(f"rank {rank}: {call}" for rank, call in calls.items())
    found: dict[str, list[int]] = {}
    for rank, call in calls.items():
        found.setdefault(call, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranges(ranks))}: {call}" for call, ranks in found.items()
    )
