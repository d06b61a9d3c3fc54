"""Creation, abort, shrink and growth of groups, by requests to the agents of all their members at once.

The gateway is not a party to groups. It knows their members, and reports which of their agents fulfilled a request.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus

from rankmesh_agent.wire.errors import DistBackendError, RankFailedError
from rankmesh_agent.wire.ranges import named_ranks
from rankmesh_agent.wire.schemas import RankGroupInfo, RankInfo
from rankmesh_gateway.clients.agent_client import AgentClient, AgentReply
from rankmesh_gateway.schemas import FanOut, GroupChanged, GroupMade, NoAnswer
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.validation import InvalidRequestError

MAKE_SECONDS = 30.0
"""Default limit for the members to meet."""
END_SECONDS = 5.0
"""Limit for a member to end a group."""
_NETWORK_SECONDS = 2.0
_MAX_STEM = 48
"""Limit of the characters of a group's name that its successor's keeps."""
_GROUP_IN_USE = "group-in-use"
"""Problem code with which an agent rejects ending a group that was not made over HTTP."""


class GroupNotMadeError(DistBackendError):
    """A member's agent could not be reached or rejected the request; ``ranks`` names it. No member has the group."""

    code = "group-not-made"
    status = 502


class GroupNameTakenError(DistBackendError):
    """Another group of the job has the name."""

    code = "group-exists"
    status = 409


class NoAgentAnsweredError(DistBackendError):
    """No agent of a group's members could be reached, or fulfilled the request."""

    code = "no-agent-answered"
    status = 502


class GroupController:
    """Sends requests to the agents of a group's members."""

    def __init__(self, registry: Registry, agents: AgentClient) -> None:
        self._registry = registry
        self._agents = agents

    async def make(self, job: str, ranks: Sequence[int], name: str, timeout: float = MAKE_SECONDS) -> GroupMade:
        """Create a group at all its members, or at none; ``ranks`` are global, by group rank; '' is a new name."""
        members = self._registry.members(job)
        _check_ranks(ranks, members)
        names = {group.name for group in self._registry.groups(job)}
        if name in names:
            raise GroupNameTakenError(
                f"job {job!r} has a group {name!r}; give another name, or none for a new one", group=name
            )
        wanted = name or next_name("group-0", names)
        document = {"ranks": list(ranks), "name": wanted, "timeout": timeout, "instance": secrets.token_hex(16)}
        replies = await self._agents.request_all(
            "POST",
            {rank: f"{members[rank].member.http}/v1/groups" for rank in ranks},
            document,
            job=job,
            seconds=timeout + _NETWORK_SECONDS,
            all_or_none=True,
        )
        ids = {rank: str(answer.document["id"]) for rank, answer in replies.items() if _created(answer)}
        if len(ids) == len(ranks) and len(set(ids.values())) == 1:
            return GroupMade(job, members[ranks[0]].epoch, ids[ranks[0]], wanted, list(ranks))
        await self._agents.request_all(
            "DELETE",
            {rank: f"{members[rank].member.http}/v1/groups/{group}" for rank, group in ids.items()},
            job=job,
            seconds=END_SECONDS,
        )
        raise _not_made_error(wanted, replies, members)

    async def abort(self, name: str, job: str | None, reason: str) -> FanOut:
        """Abort a group at all members: its pending calls fail with the reason."""
        group, ranks = self._registry.find_group(name, job)
        asked = {rank: ranks[rank] for rank in group.ranks if rank in ranks and ranks[rank].state != "left"}
        replies = await self._abort(group, asked, reason)
        outcome = _outcome(group, asked, replies)
        if not outcome.answered:
            why = "; ".join(f"rank {each.rank}: {each.detail}" for each in outcome.failed) or "all have left"
            raise NoAgentAnsweredError(f"no member of group {group.name!r} has aborted it: {why}", group=group.name)
        return outcome

    async def shrink(self, name: str, job: str | None, without: Iterable[int], timeout: float) -> GroupChanged:
        """Create a group of the remaining members, and end the old one at all live members."""
        group, ranks = self._registry.find_group(name, job)
        out = set(without)
        strangers = sorted(out - set(group.ranks))
        if strangers:
            raise InvalidRequestError(f"without: {_listed(strangers)} not in group {group.name!r}, {group.ranks}")
        rest = [rank for rank in group.ranks if rank not in out and _is_live(ranks.get(rank))]
        if len(rest) == len(group.ranks):
            raise InvalidRequestError(
                f"all {len(rest)} members of group {group.name!r} are live, and 'without' is empty: "
                "list the ranks to leave out"
            )
        if not rest:
            raise InvalidRequestError(f"no member would be left of group {group.name!r}, {group.ranks}")
        return await self._replace(
            group, ranks, rest, timeout, f"it was made smaller: it goes on with {named_ranks(rest)}"
        )

    async def grow(self, name: str, job: str | None, more: Sequence[int], timeout: float) -> GroupChanged:
        """Create a group of the members and more ranks behind them, and end the old one."""
        group, ranks = self._registry.find_group(name, job)
        already = sorted(set(more) & set(group.ranks))
        if already:
            raise InvalidRequestError(f"with: {_listed(already)} in group {group.name!r} already, {group.ranks}")
        if not more:
            raise InvalidRequestError(f"'with' is empty: list the ranks to add to group {group.name!r}")
        wanted = [*group.ranks, *more]
        return await self._replace(
            group, ranks, wanted, timeout, f"it was made larger: it goes on with {named_ranks(wanted)}"
        )

    async def _replace(
        self, group: RankGroupInfo, ranks: Mapping[int, RankInfo], wanted: list[int], timeout: float, why: str
    ) -> GroupChanged:
        name = next_name(group.name, {other.name for other in self._registry.groups(group.job)})
        made = await self.make(group.job, wanted, name, timeout)
        living = {rank: ranks[rank] for rank in group.ranks if _is_live(ranks.get(rank))}
        replies = await self._agents.request_all("DELETE", _urls(group, living), job=group.job, seconds=END_SECONDS)
        in_use = {rank: living[rank] for rank, answer in replies.items() if answer.code == _GROUP_IN_USE}
        replies |= await self._abort(group, in_use, why)
        return GroupChanged(made, _outcome(group, living, replies))

    async def _abort(self, group: RankGroupInfo, ranks: Mapping[int, RankInfo], reason: str) -> dict[int, AgentReply]:
        urls = {rank: f"{url}/abort" for rank, url in _urls(group, ranks).items()}
        return await self._agents.request_all("POST", urls, {"reason": reason}, job=group.job, seconds=END_SECONDS)


def next_name(name: str, taken: set[str]) -> str:
    """Return the name of a group that replaces another: ``pair-2`` after ``pair``, ``pair-3`` after that."""
    stem, number = re.fullmatch(r"(.*?)(?:-(\d{1,9}))?", name, re.DOTALL).groups()  # type: ignore[union-attr]
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", stem)[:_MAX_STEM].lstrip("._-") or "group"
    numbers = itertools.count(int(number or 1) + 1)
    return next(wanted for each in numbers if (wanted := f"{stem}-{each}") not in taken)


def _check_ranks(ranks: Sequence[int], members: Mapping[int, RankInfo]) -> None:
    if not ranks:
        raise InvalidRequestError("ranks is empty: list the members of the group")
    if len(set(ranks)) < len(ranks):
        raise InvalidRequestError(f"a rank is listed twice: {list(ranks)}")
    unknown = [rank for rank in ranks if rank not in members]
    if unknown:
        raise InvalidRequestError(f"{_listed(unknown)} not in the job, whose ranks are 0 to {max(members)}")
    gone = [members[rank] for rank in ranks if not _is_live(members[rank])]
    if gone:
        words = ", ".join(
            f"{info.member.described()} has {info.state} ({info.reason or 'it was done'})" for info in gone
        )
        raise RankFailedError(f"cannot make a group with them: {words}", ranks=[info.member.rank for info in gone])


def _created(reply: AgentReply) -> bool:
    return reply.ok and isinstance(reply.document, dict) and isinstance(reply.document.get("id"), str)


def _not_made_error(name: str, replies: Mapping[int, AgentReply], members: Mapping[int, RankInfo]) -> GroupNotMadeError:
    failed = {rank: answer for rank, answer in replies.items() if not _created(answer)}
    if not failed:
        return GroupNotMadeError(
            f"group {name!r} was not made: its members differ on its id, which is a bug", group=name
        )
    words = "; ".join(
        f"the agent of {members[rank].member.described()}: {answer.detail or 'unexpected response'}"
        for rank, answer in failed.items()
    )
    return GroupNotMadeError(f"group {name!r} was not made at any rank: {words}", ranks=sorted(failed), group=name)


def _is_live(info: RankInfo | None) -> bool:
    return info is not None and info.state in ("alive", "suspect")


def _urls(group: RankGroupInfo, ranks: Mapping[int, RankInfo]) -> dict[int, str]:
    return {rank: f"{info.member.http}/v1/groups/{group.id}" for rank, info in ranks.items()}


def _outcome(group: RankGroupInfo, asked: Iterable[int], replies: Mapping[int, AgentReply]) -> FanOut:
    # 404: the group has ended at this member before.
    done = [rank for rank in asked if replies[rank].ok or replies[rank].status == HTTPStatus.NOT_FOUND]
    failed = [NoAnswer(rank, replies[rank].detail) for rank in asked if rank not in done]
    return FanOut(group.id, group.name, list(asked), done, failed)


def _listed(ranks: Sequence[int]) -> str:
    return f"{named_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"
