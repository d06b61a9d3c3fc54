"""The gateway as an agent sees it: join, signs of life, goodbye. Plain HTTP; collectives never need it.

An agent says that it lives each HEARTBEAT_SECONDS, and at once when it has something to say that cannot wait: that a
peer is gone, or to whom it is leased.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.http_client import HttpClient, HttpResponse, NoResponseError
from rankmesh_agent.progress.disconnects import DisconnectMonitor
from rankmesh_agent.wire.errors import (
    DistNetworkError,
    GatewayUnreachableError,
    JoinTimeoutError,
    from_code,
)
from rankmesh_agent.wire.schemas import (
    HEARTBEAT_SECONDS,
    LONG_POLL_SECONDS,
    SUSPECT_SECONDS,
    UNASSIGNED,
    AgentHeartbeat,
    AgentLeave,
    Heartbeat,
    JoinReply,
    JoinRequest,
    Leave,
    Member,
)
from rankmesh_agent.wire.stats import HeartbeatStats

_log = logging.getLogger("rankmesh")

_HEART = "rankmesh-heartbeat"
_RETRY_SECONDS = 0.1
_SHORTEST_POLL_SECONDS = 0.05
_ANY_EPOCH = 1
"""Epoch of a goodbye before the join is complete: the gateway goes by the instance."""
_ANSWER_SECONDS = 2.0
"""How long an answer may take beyond what it was asked to wait."""
_PATIENCE = 5.0
"""Seconds in vain after which a warning says what we wait for."""
_BREATH_SECONDS = 0.1
"""The least time between two heartbeats."""
_NOT_NOW = frozenset({500, 502, 503, 504})
"""HTTP statuses of a gateway that cannot answer at the moment (it is closing, say), or of a proxy in front of it."""


class _NotNowError(Exception):
    """The gateway is there, but cannot answer at the moment."""


class GatewayClient:
    """One connection to a gateway.

    Args:
        find: returns the gateway's base URL, or None while it is not known; asked again after each failure, because
            the gateway may be elsewhere by then, or this process's to host.
        token: the job's token.
    """

    def __init__(self, find: Callable[[], str | None], token: str) -> None:
        self._find = find
        self.url = ""
        self._heard = time.monotonic()
        self._beats = [0, 0]
        self._refused: int | None = None
        self._asker = HttpClient(token)

    def join(self, job: str, world_size: int, member: Member, deadline: Deadline) -> JoinReply:
        """Join a job and wait until everyone has.

        Args:
            job: the job's name.
            world_size: how many ranks it has.
            member: who joins; if its rank is UNASSIGNED, the reply's member with the same instance has one.
            deadline: when to give up. A gateway that is away or closing is asked again until then.

        Raises:
            GatewayUnreachableError: nobody answers there before the deadline.
            JoinTimeoutError: ranks are missing at the deadline; names them.
            RankTakenError, WorldSizeMismatchError: the gateway refuses.
        """
        seen: dict[int | str, Member] = {}
        try:
            return self._keep_joining(job, world_size, member, deadline, seen)
        except BaseException as error:
            if seen:  # free the place, for whoever tries again
                why = f"it gave up joining: {type(error).__name__}"
                self.leave(Leave(job, _ANY_EPOCH, member.rank, member.instance, why))
            raise

    def _keep_joining(
        self, job: str, world_size: int, member: Member, deadline: Deadline, seen: dict[int | str, Member]
    ) -> JoinReply:
        failure = "its address is not known yet"
        patience = Deadline(_PATIENCE)
        url: str | None = None
        while not deadline.expired():
            url = url or self._find()
            if url is not None:
                self.url = url
                # Who gives up before us, perhaps taking the gateway along, is not one who never came: the first look is
                # at once, and the last ones are close together.
                wait = max(_SHORTEST_POLL_SECONDS, min(LONG_POLL_SECONDS, deadline.remaining() / 2)) if seen else 0.0
                limit = min(wait, deadline.remaining()) + _ANSWER_SECONDS
                try:
                    reply = self._join(url, JoinRequest(job, world_size, member, wait), limit)
                except (NoResponseError, _NotNowError) as error:
                    failure = str(error) or type(error).__name__
                else:
                    if reply.complete:
                        self._heard = time.monotonic()
                        return reply
                    seen |= {_key(there): there for there in reply.members}
                    time.sleep(min(_SHORTEST_POLL_SECONDS, deadline.remaining()) if wait else 0)
                    continue
            if patience.expired():
                where = url or "an unknown address"
                _log.warning("%s still waits for the gateway at %s: %s", member.described(), where, failure)
                patience = Deadline(deadline.remaining() + 1)
            url = None
            time.sleep(min(_RETRY_SECONDS, deadline.remaining()))
        if seen:
            raise _missing(job, world_size, member, seen, deadline)
        raise GatewayUnreachableError(
            f"{_who(member)} could not reach the gateway at {self.url or 'an unknown address'} within "
            f"{deadline.seconds:.0f} s: {failure}. The gateway runs in rank 0, or in the first process to come where "
            "ranks are left out, unless a launcher hosts it: is that running, and are MASTER_ADDR and MASTER_PORT (or "
            "the init_method) the same on every rank?",
            ranks=[] if member.rank == UNASSIGNED else [member.rank],
            address=self.url or None,
        )

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Tell the gateway that this rank lives; a gateway that is away for the moment does not matter.

        One that has been away for SUSPECT_SECONDS is looked for again: it may be elsewhere by now, or have ended with
        the process that hosted it and be this one's to host. The ranks' next signs of life tell it who they are.
        """
        self._live("heartbeat", heartbeat)

    def beat(self, beat: AgentHeartbeat) -> bool:
        """Tell the gateway that this standalone agent lives, as ``heartbeat`` does for a rank.

        One that refuses, because the token is another one's, say, is warned about once.

        Returns:
            Whether the gateway has taken note.
        """
        if not self.url:
            self.url = self._find() or ""
        answer = self._live("agents", beat) if self.url else None
        refused = answer.status if answer is not None and answer.status not in {HTTPStatus.OK, *_NOT_NOW} else None
        if answer is not None and refused is not None and refused != self._refused:
            _log.warning("standalone agent %s is not registered: %s", beat.name, _refusal(answer, self.url))
        self._refused = refused
        return answer is not None and answer.status == HTTPStatus.OK

    def pulse(self) -> HeartbeatStats:
        """Return how the heartbeats have fared."""
        unanswered, answered = self._beats
        return HeartbeatStats(answered, unanswered, time.monotonic() - self._heard)

    def leave(self, leave: Leave) -> None:
        """Say goodbye; a gateway that is gone already does not matter."""
        with contextlib.suppress(NoResponseError):
            self._post(self.url, "leave", leave)

    def depart(self, goodbye: AgentLeave) -> None:
        """Say that this standalone agent ends; a gateway that is gone already does not matter."""
        if self.url:
            with contextlib.suppress(NoResponseError):
                self._post(self.url, "agents/leave", goodbye)

    def close(self) -> None:
        """Close the connection."""
        self._asker.close()

    def _join(self, url: str, request: JoinRequest, limit: float) -> JoinReply:
        answer = self._post(url, "join", request, limit)
        if answer.status in _NOT_NOW:
            raise _NotNowError(str(_refusal(answer, url)))
        if answer.status != HTTPStatus.OK:
            raise _refusal(answer, url)
        try:
            said = answer.json()
            return JoinReply(**said | {"members": [Member(**member) for member in said["members"]]})
        except (ValueError, KeyError, TypeError):
            raise _stranger(answer, url) from None

    def _live(self, what: str, sign: Heartbeat | AgentHeartbeat) -> HttpResponse | None:
        """Send a sign of life, and look for the gateway if it has been away for long; return its answer."""
        answer = None
        with contextlib.suppress(NoResponseError):
            answer = self._post(self.url, what, sign)
        answered = answer is not None and answer.status not in _NOT_NOW
        self._beats[answered] += 1
        if answered:
            self._heard = time.monotonic()
        if time.monotonic() - self._heard > SUSPECT_SECONDS:
            with contextlib.suppress(DistNetworkError):
                self.url = self._find() or self.url
        return answer

    def _post(
        self,
        url: str,
        what: str,
        document: JoinRequest | Heartbeat | Leave | AgentHeartbeat | AgentLeave,
        timeout: float = _ANSWER_SECONDS,
    ) -> HttpResponse:
        return self._asker.request("POST", f"{url}/v1/{what}", asdict(document), timeout=timeout)


def gateway_id(url: str, timeout: float = 2.0) -> str | None:
    """Return the random id of the RankMesh gateway that answers at ``url``, None if none does within ``timeout`` s."""
    asker = HttpClient()
    try:
        health = asker.request("GET", f"{url}/health", timeout=timeout).json()
        return str(health["id"]) if health["service"] == "rankmesh-gateway" else None
    except (NoResponseError, ValueError, KeyError, TypeError):
        return None
    finally:
        asker.close()


class Heart(threading.Thread):
    """Sends a sign of life every HEARTBEAT_SECONDS until stopped, and when there is something to say.

    Args:
        beat: sends one; called in this thread only.
        vigil: finds out which peers are gone, which is to be said at once; closed with this.
    """

    def __init__(self, beat: Callable[[], None], vigil: DisconnectMonitor | None = None) -> None:
        super().__init__(name=_HEART, daemon=True)
        self._beat = beat
        self._vigil = vigil
        self._stopping = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # the bell is not rung when its number may be another file's
        self._closed = False

    def run(self) -> None:
        """Beat."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if self._vigil is not None:
            poll.register(self._vigil.fileno(), select.POLLIN)
        last = time.monotonic()
        while not self._stopping:
            try:
                urgent = self._wait(poll, last + HEARTBEAT_SECONDS)
                if self._stopping:
                    return
                if urgent:  # a job that falls apart is told of in few words
                    time.sleep(max(0.0, last + _BREATH_SECONDS - time.monotonic()))
                elif time.monotonic() < last + HEARTBEAT_SECONDS:
                    continue
                last = time.monotonic()
                self._beat()
            except Exception:  # a heart that stops is a rank that others hold for failed
                _log.exception("a heartbeat could not be sent")
                time.sleep(_BREATH_SECONDS)

    def wake(self) -> None:
        """Have it beat now. From any thread; does nothing once stopped."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        """Beat no more. Does nothing the second time."""
        self._stopping = True
        self.wake()
        if self.is_alive():
            self.join()
        self._close()

    def forget(self) -> None:
        """In a forked child, where the thread is not: let go of the descriptors."""
        self._lock = threading.Lock()
        self._close()

    def _wait(self, poll: select.poll, until: float) -> bool:
        """Wait for the time of the next beat; return whether there is something to say before."""
        seconds = max(0.0, until - time.monotonic())
        if self._vigil is not None:
            seconds = min(seconds, self._vigil.next_check())
        ready = {fd for fd, _ in poll.poll(math.ceil(seconds * 1000))}
        woken = self._bell in ready
        if woken:
            os.eventfd_read(self._bell)
        return (self._vigil is not None and self._vigil.poll()) or woken

    def _close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
            if not closed:
                os.close(self._bell)
                if self._vigil is not None:
                    self._vigil.close()


def _key(member: Member) -> int | str:
    """What tells joiners apart: their ranks, as far as they have any."""
    return member.instance if member.rank == UNASSIGNED else member.rank


def _who(member: Member) -> str:
    return member.described() if member.rank == UNASSIGNED else f"rank {member.rank}"


def _missing(
    job: str, world_size: int, member: Member, seen: dict[int | str, Member], deadline: Deadline
) -> JoinTimeoutError:
    joined = ", ".join(there.described() for there in sorted(seen.values(), key=lambda there: there.rank))
    missing = [rank for rank in range(world_size) if rank not in seen]
    awaited = f"ranks {', '.join(map(str, missing))}"
    if any(there.rank == UNASSIGNED for there in seen.values()):  # any of the others may get any of the missing ranks
        missing, awaited = [], f"{max(1, world_size - len(seen))} more process(es)"
    return JoinTimeoutError(
        f"{_who(member)} waited {deadline.seconds:.1f} s for {awaited} of job {job!r} to join "
        f"(world size {world_size}); joined: {joined}",
        ranks=missing,
    )


def _refusal(answer: HttpResponse, url: str) -> Exception:
    try:
        problem: dict[str, Any] = answer.json()
        code, detail = problem.pop("code"), problem.pop("detail")
    except (ValueError, KeyError, AttributeError, TypeError):
        return _stranger(answer, url)
    return from_code(code, f"the gateway at {url} refuses: {detail}", **problem)


def _stranger(answer: HttpResponse, url: str) -> DistNetworkError:
    return DistNetworkError(
        f"{url} is not a RankMesh gateway: it answered {answer.status} to a join. Is the port another program's "
        "(torchrun's store listens on MASTER_PORT: start with 'rankmesh run' instead)?",
        address=url,
    )
