"""Faults, planted one at a time, that the test suite has to notice: ``python tests/mutants.py``. Not part of any run.

Each fault replaces one piece of source text in a copy of the tree and runs the tests that should fail, with ``-x -q``.
A fault is *killed* when a test fails or cannot be collected, *survived* when all pass, *hung* when the tests do not end
within the limit: a hang is no kill, since tests end their own waits by deadlines. It is *stale* when the old text does
not occur exactly once, or the tests fail without it. The exit status is the number of faults that are not killed, at most 100.

The tests of faults in the Python code run without the compiled core, or by ``--native 1`` with it. Faults in the core
itself are compiled, in some ten seconds. What only other processors reorder, loads and stores without acquire, release
and fence, no test on x86 can see, and a fence before a sleep of one slice costs its time at most.

Processes that a fault leaves behind become children of this one, which ends them after each fault.
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ("agent", "gateway", "sdk", "tests", "pyproject.toml", "hatch_build.py")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

C = "agent/rankmesh_agent/collectives/"
T = "agent/rankmesh_agent/transports/"
S = "agent/rankmesh_agent/shared_memory/"
N = "agent/rankmesh_agent/native/"
W = "agent/rankmesh_agent/wire/"
P = "agent/rankmesh_agent/progress/"
GROUP = "agent/rankmesh_agent/group/"
GPU = "agent/rankmesh_agent/gpu/"
STORE = "agent/rankmesh_agent/store/"
STATE = "gateway/rankmesh_gateway/state/"
CALLS = "sdk/rankmesh/_collectives/"
LAUNCHER = "sdk/rankmesh/_launcher/"

SWEEP = "agent/collectives/test_sweep.py"
REDUCTION = f"agent/collectives/test_reduction.py {SWEEP} -k 'test_reduction or segment'"
FLOAT16 = "agent/collectives/test_float16.py"
SEGMENT = f"{SWEEP} agent/group/test_wrong_calls.py -k segment"
LINK = f"{SWEEP} -k link"
ALL_REDUCE = f"agent/collectives/test_all_reduce_links.py {SWEEP} -k link"
DIRECT = f"agent/collectives/test_direct.py {SWEEP} -k 'test_direct or registered or reads'"
HOSTS = f"agent/collectives/test_hosts_order.py agent/collectives/test_leaders.py {SWEEP} -k 'hosts or leaders'"
SELECT = "agent/collectives/test_select.py agent/collectives/test_switching.py"
MEMORY = "agent/shared_memory/test_segment.py"
MISMATCHES = "sdk/test_wrong_calls.py agent/group"
WRONG = "sdk/test_wrong_calls.py"
GPU_FAILURE = "gpu/test_failure.py"
GROUPS = "agent/group agent/backends"
FILES = "agent/shared_memory/test_mapping.py"
CORE = "sdk/test_native.py"
CORE_CALLS = "agent/native/test_calls.py"
CORE_BITS = f"{CORE} -k bit_for_bit"
CORE_MESSAGES = "agent/native/test_messages.py security/test_hostile_ring.py"
STAGING = "agent/remote/test_staging.py security/test_hostile_staging.py"
RING = "agent/transports/test_shm_ring.py agent/transports/test_conformance.py"
FRAMES = "agent/wire/test_frames.py"
PROOF = "security/test_authority.py security/test_hello.py security/test_credentials.py security/test_roles.py"
MATCHING = "agent/progress/test_matching.py"
LONG = "agent/progress/test_long_messages.py"
QUEUES = "agent/progress/test_message_queues.py"
P2P = "agent/group/test_p2p_read.py"
STATUS = "agent/progress/test_status.py agent/progress/test_wait_graph.py -k 'not mismatch_names and not ahead and not missing_ranks'"
QUEUE = "agent/group/test_call_queue.py agent/group/test_work.py"
FAILURE = "agent/group agent/progress sdk/test_failure.py"
TABLE = (
    "agent/store/test_table.py agent/store/test_stores.py agent/store/test_server.py agent/store/test_pending_calls.py"
)
GATEWAY = "gateway/state"
PLAIN = "sdk/collectives/test_plain.py"
SERIALIZE = "sdk/collectives/test_serialize.py"
LAUNCH = "sdk/launcher/test_processes.py sdk/launcher/test_output.py sdk/launcher/test_failure.py"
SESSIONS = "gateway/rankmesh_gateway/http/dashboard_sessions.py"
LINK_CODE = "security/test_dashboard_sessions.py"
PEERS = "agent/net/test_peer_credentials.py security/test_other_users.py"
TORCH_STORE = "gateway/test_torch_store.py security/test_torch_store_peers.py"
LINES = "sdk/launcher/test_line_buffer.py sdk/launcher/test_output.py"


class Fault(NamedTuple):
    """A fault: where, the text before and after, the tests that have to fail, and what goes wrong with it."""

    file: str
    old: str
    new: str
    tests: str
    why: str


# fmt: off
FAULTS = [
    # Arithmetic
    Fault(C + "reduction.py", "ReduceOp.MIN: np.minimum", "ReduceOp.MIN: np.fmin", REDUCTION, "MIN loses NaN"),
    Fault(C + "reduction.py", "ReduceOp.MAX: np.maximum", "ReduceOp.MAX: np.minimum", REDUCTION, "MAX gives the minimum"),
    Fault(C + "reduction.py", "np.divide(out, len(parts), out=out)", "pass", REDUCTION, "AVG of floats is the sum"),
    Fault(C + "reduction.py", "np.where(total < 0, members - 1, 0)", "0", REDUCTION, "AVG of integers rounds downwards"),
    Fault(C + "reduction.py", "    return WIDE.get(dtype)\n", "    return None\n", REDUCTION, "narrow floats are rounded at every step"),
    Fault(C + "reduction.py", "return WIDE.get(dtype, dtype)", "return dtype", HOSTS, "partial results of narrow floats are rounded"),
    Fault(C + "reduction.py", "for part in parts[2:]:\n            ufunc(out, part, out=out)\n        return", "for part in parts[:1:-1]:\n            ufunc(out, part, out=out)\n        return", "agent/collectives", "not in rank order"),
    Fault(C + "reduction.py", "if rank > 1 and np.may_share_memory(", "if rank > 2 and np.may_share_memory(", LINK, "the result overwrites a part that is read later"),
    Fault(C + "reduction.py", "if out.size == 1 and op is ReduceOp.PRODUCT", "if out.size == 0 and op is ReduceOp.PRODUCT", "agent/collectives", "a single complex product is rounded in two ways"),
    Fault(C + "reduction.py", 'context.run(np.seterr, all="ignore")', 'context.run(np.seterr, all="raise")', SEGMENT, "overflow raises at one rank"),
    Fault(C + "reduction.py", "limits.min <= factor <= limits.max", "limits.min <= factor", REDUCTION, "a factor wraps around"),
    Fault(C + "reduction.py", 'ReduceOp.AVG: frozenset({"int"', 'ReduceOp.AVG: frozenset({"bool", "int"', REDUCTION, "AVG of bool is let through"),
    Fault(C + "reduction.py", "        if array.dtype in WIDE:\n            narrow(", "        if False:\n            narrow(", REDUCTION, "PREMUL_SUM rounds its factor to a narrow dtype"),
    Fault(C + "float16.py", "_BELOW_HALF = np.int32((1 << 12) - 1)", "_BELOW_HALF = np.int32(1 << 12)", FLOAT16, "ties are rounded up"),
    Fault(C + "float16.py", "if bound > divisor * _LARGEST and", "if bound < 0 and", FLOAT16, "sums that are infinite wrap"),
    Fault(C + "float16.py", "np.bitwise_or(bits, signs, out=bits)", "pass", FLOAT16, "negative numbers lose the sign"),
    Fault(C + "float16.py", "if _largest(piece) is None:", "if False:", FLOAT16, "infinity and NaN become numbers"),
    Fault(C + "float16.py", "1 / divisor", "1.0", FLOAT16, "AVG of long float16 is the sum"),
    # Algorithms over shared memory
    Fault(C + "all_reduce.py", "if rank <= 1 and array.nbytes", "if rank <= 2 and array.nbytes", SEGMENT, "rank 2 overwrites a part"),
    Fault(C + "all_reduce.py", "own if rank <= 1 else", "own if rank <= 2 else", SEGMENT, "rank 2 reduces into its own part"),
    Fault(C + "all_reduce.py", "slots[rank][mine] = reduced", "slots[rank][mine] = own", SEGMENT, "a rank publishes what it had"),
    Fault(C + "all_reduce.py", "for part in parts:\n            part[:] = reduced", "for part in parts[:-1]:\n            part[:] = reduced", DIRECT, "the last rank's registered array stays as it was"),
    Fault(C + "all_gather.py", "longest or 1, capacity)", "longest, capacity)", SEGMENT, "an empty all_gather does not wait"),
    Fault(C + "all_gather.py", "if any(np.may_share_memory(", "if False and any(np.may_share_memory(", DIRECT, "what is sent is overwritten by what comes"),
    Fault(C + "reduce_scatter.py", "parts[rank] = inputs[rank][begin", "parts[rank] = inputs[0][begin", SEGMENT, "a rank adds another's part"),
    Fault(C + "reduce_scatter.py", "not np.may_share_memory(output, part) else", "True else", DIRECT, "others read inputs that are overwritten"),
    Fault(C + "reduce_scatter.py", "for view in views]", "for view in views[::-1]]", DIRECT, "registered arrays are reduced from the last rank on"),
    Fault(C + "broadcast.py", "or [slice(0, 0)]", "or []", SEGMENT, "an empty broadcast does not wait"),
    Fault(C + "broadcast.py", "segment.read(exposure, root, 0,", "segment.read(exposure, 0, 0,", DIRECT, "all read rank 0's array"),
    Fault(C + "gather.py", "array.size or 1, capacity)", "array.size, capacity)", SEGMENT, "an empty gather does not wait"),
    Fault(C + "gather.py", "        outputs[root][:] = array\n    segment.complete", "        pass\n    segment.complete", DIRECT, "the root's own part is missing"),
    Fault(C + "scatter.py", "output.size or 1, lane)", "output.size, lane)", SEGMENT, "an empty scatter does not wait"),
    Fault(C + "scatter.py", "early = sending and not any(", "early = sending and any(", DIRECT, "the root's output overwrites what the others still read"),
    Fault(C + "reduce.py", "    if segment.rank == root:\n        combine(", "    if True:\n        combine(", SEGMENT, "reduce changes the arrays of the other ranks"),
    Fault(C + "reduce.py", "(part if rank == root else slots[rank])[mine] = reduced", "slots[rank][mine] = reduced", SEGMENT, "the root's share is missing"),
    Fault(C + "reduce.py", "parts[root][:] = reduced", "parts[0][:] = reduced", DIRECT, "rank 0 gets the result"),
    Fault(C + "all_to_all.py", "if max(sent) > lane and any(", "if max(sent) < 0 and any(", DIRECT, "a chunk is read after it was overwritten"),
    Fault(C + "all_to_all.py", "    if [row[:size] for row in rows] != list(", "    if not rows and list(", MISMATCHES, "lengths that do not fit go unnoticed over shared memory"),
    Fault(C + "barrier.py", "    segment.step()", "    pass", SEGMENT, "nobody waits in a barrier"),
    # Algorithms over messages
    Fault(C + "all_reduce.py", "    if link.rank:\n", "    if link.rank > 1:\n", ALL_REDUCE, "rank 1 gets no result"),
    Fault(C + "select.py", "Row(all_reduce.direct_link, {2: ANY, 17: NEVER})", "Row(all_reduce.direct_link, {2: NEVER})", SELECT, "few ranks pass on partial results that are longer"),
    Fault(C + "all_reduce.py", "if 2 * distance == power else None", "if distance == power else None", ALL_REDUCE, "halving never divides an average"),
    Fault(C + "all_reduce.py", "reversed(swapped)", "swapped", ALL_REDUCE, "halves are swapped back in the wrong order"),
    Fault(C + "all_reduce.py", "split[(rank - step + 2) % size]", "split[(rank - step + 1) % size]", ALL_REDUCE, "the ring passes on the wrong share"),
    Fault(C + "all_gather.py", "    outputs[link.rank][:] = array", "    pass", LINK, "a rank's own output stays empty"),
    Fault(C + "reduce_scatter.py", "if rank > 1 and np.may_share_memory(own", "if rank > 9 and np.may_share_memory(own", LINK, "the result overwrites a part that is read later"),
    Fault(C + "reduce_scatter.py", "rows[number % 2, other, :count]", "rows[0, other, :count]", LINK, "the next piece lands where this one is read"),
    Fault(C + "broadcast.py", "peers = [rank for rank in others if rank != root]", "peers = others", LINK, "the root is sent what it does not expect"),
    Fault(C + "gather.py", "        outputs[root][:] = array\n    else", "        pass\n    else", LINK, "the root's own part is missing"),
    Fault(C + "scatter.py", "        output[:] = inputs[root]\n    else", "        pass\n    else", LINK, "the root's own part is missing"),
    Fault(C + "reduce.py", "    if pending is not None:\n        link.finish(pending)", "    if False:\n        link.finish(pending)", LINK, "the last piece is not waited for"),
    Fault(C + "all_to_all.py", "if not short[link.rank]:", "if short[link.rank]:", LINK, "a rank's own long part is missing"),
    Fault(C + "all_to_all.py", "part.nbytes <= _EAGER for part", "part.nbytes < _EAGER for part", LINK, "sender and receiver differ on what rides along"),
    Fault(C + "all_to_all.py", "if (sent != expected.T).any():", "if not sent.size:", MISMATCHES, "lengths that do not fit go unnoticed over messages"),
    Fault(C + "barrier.py", "link.arrive()", "pass", f"{SWEEP} -k barrier", "nobody waits in a barrier"),
    Fault(C + "rounds.py", "merge(received, payload) if partner < place else merge(payload, received)", "merge(payload, received)", "agent/collectives", "ranks reduce in different orders"),
    Fault(C + "link.py", "min((rank + 1) * share, count)", "(rank + 1) * share", "agent/collectives", "shares reach past the end"),
    # Algorithms over hosts
    Fault(C + "hosts.py", "min(map(len, layout))", "max(map(len, layout))", HOSTS, "rails need ranks that hosts lack"),
    Fault(C + "hosts.py", "slots[leader][lane * number :]", "slots[leader][lane * (number - 1) :]", HOSTS, "a received array overwrites the leader's own"),
    Fault(C + "hosts.py", "partials.insert(topology.host, total[mine])", "partials.append(total[mine])", HOSTS, "hosts are not reduced in their order"),
    Fault(C + "hosts.py", "combine_partials(op, partials, topology.size,", "combine_partials(op, partials, len(rail),", HOSTS, "an average is divided by the number of hosts"),
    Fault(C + "hosts.py", "lag = 1 if peers else 0", "lag = 0", HOSTS, "three hosts do not exchange their pieces"),
    Fault(C + "hosts.py", "by = root_host if len(topology.layout) == 2 else range(len(topology.layout))", "by = root_host", HOSTS, "the root's host receives every host's array"),
    Fault(C + "hosts.py", "slots[topology.local_rank % topology.leaders][places", "slots[0][places", HOSTS, "a rank takes its output from another leader"),
    # Selection
    Fault(C + "select.py", "ANY if slot_bytes is None else", "ANY if slot_bytes else", SELECT, "the limit of a slot is never"),
    Fault(C + "select.py", "if ranks <= size", "if ranks >= size", SELECT, "limits of a larger group are taken"),
    Fault(C + "select.py", "nbytes <= min(", "nbytes < min(", SELECT, "an array of just the limit takes the next"),
    # Shared memory of a group
    Fault(S + "slots.py", "self._turn = self._turn ^ 1", "self._turn = 1", SEGMENT + " " + MEMORY, "a slot is written while it is read"),
    Fault(S + "slots.py", "            futex_wake(self._address)", "            pass", MEMORY, "sleepers are not woken"),
    Fault(S + "slots.py", "if sleepers or words[own + _SLEEPERS]:", "if words[own + _SLEEPERS]:", "agent/shared_memory/test_wakeups.py", "a sleeper whose flag is cleared is not woken"),
    Fault(S + "slots.py", "if words[line + word] != fingerprint:", "if False:", MEMORY + " agent/group", "different calls go unnoticed"),
    Fault(S + "slots.py", "self._word = 1 + (seq & 1)", "self._word = 1", MEMORY + " agent/group", "a fingerprint is overwritten while it is read"),
    Fault(S + "slots.py", "self._turn = 0  #", "pass  #", MEMORY + " agent/group", "after a mismatch ranks use different slots"),
    Fault(S + "slots.py", "self._words[self._own_line + _LEFT] = 1", "pass", MEMORY + " agent/group agent/collectives/test_direct.py", "nobody learns that a rank left a call"),
    Fault(S + "slots.py", "words[line + _SLEEPERS] = 1", "pass", MEMORY, "a sleeper is not known"),
    Fault(S + "segment.py", "self.step(exposure.readers)", "self.step([])", DIRECT, "an array changes while it is read"),
    Fault(S + "segment.py", "not any(PRIVATE in row", "not all(PRIVATE in row", DIRECT, "an unregistered array is looked for in registered memory"),
    Fault("agent/rankmesh_agent/backends/cpu.py", "segment.make_arrays_private(arguments)", "pass", "sdk/collectives/test_shared_memory.py -k late", "a late rank writes into arrays of a call that has failed"),
    # Rings in shared memory
    Fault("agent/rankmesh_agent/remote/staging.py", "seals & ~_SEAL_EXEC != _SEALS or ", "", STAGING, "an attached process may cut off the memory that its agent uses"),
    Fault("agent/rankmesh_agent/remote/staging.py", " or nbytes > self._staging.bytes.size", "", STAGING, "a call's arrays may be longer than the buffer"),
    Fault("agent/rankmesh_agent/remote/staging.py", "failed or not is_kept", "not is_kept", STAGING, "a buffer that a failed call may still write to is used again"),
    Fault(S + "orphans.py", "            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "", FILES, "memory of a process that lives is removed"),
    Fault("agent/rankmesh_agent/net/fork.py", "    import_lock.acquire(timeout=_FORK_SECONDS)", "    pass", "sdk/test_fork.py -k imports", "a child waits for an import of its parent"),
    Fault(GROUP + "work.py", "    if made_in is not _process:", "    if False:", "sdk/test_fork.py", "a child waits for its parent's call"),
    Fault(T + "shm_ring.py", "into[first:] = data[: length - first]", "pass", RING, "bytes past the end of the ring are lost"),
    Fault(T + "shm_ring.py", "room = capacity - (head - words[_TAIL])", "room = capacity", RING, "unread bytes are overwritten"),
    Fault(T + "shm_ring.py", "return not self.has_work(writing, reading)", "return True", RING, "data that came before sleep is not seen"),
    Fault(T + "shm_ring.py", "        if received:\n            self._ring_doorbell(self._in, _WRITER_SLEEPS)", "        if received:\n            pass", RING, "a full ring's writer is not woken"),
    Fault(T + "shm_ring.py", " or data[at : at + len(head)] != head", "", RING, "a frame is taken for another one"),
    Fault(T + "shm_ring.py", "            self._lost = error", "            pass", RING, "a peer's end goes unnoticed"),
    Fault(T + "shm_ring.py", "(self._generation + 1) %", "self._generation %", RING + " " + P2P, "changed bytes are taken for the message"),
    Fault(T + "shm_ring.py", "mapping is None or mapping.bytes", "mapping is None or not mapping.bytes", RING, "memory of another pair is taken"),
    Fault(T + "shm_ring.py", "        self.revoke()\n        self._lost", "        self._lost", RING + " " + P2P, "what a rank that left has offered is taken"),
    # Frames
    Fault(W + "frames.py", 'struct.Struct("!4s', 'struct.Struct("<4s', FRAMES, "frames are little-endian"),
    Fault(W + "frames.py", "if magic != MAGIC:", "if False:", FRAMES, "any bytes are a frame"),
    Fault(W + "frames.py", "if version != PROTOCOL_VERSION:", "if False:", FRAMES, "another version is read as ours"),
    Fault(W + "frames.py", "if dtype and dtype not in dtypes.FROM_CODE:", "if False:", FRAMES, "an unknown dtype is passed on"),
    Fault(W + "frames.py", "length > (eager_limit if opcode is Opcode.EAGER else SMALL)", "length > eager_limit", FRAMES, "a frame of any kind may be as long as an eager one"),
    Fault(W + "frames.py", "frozenset({Opcode.PART, Opcode.BULK})", "frozenset({Opcode.PART, Opcode.BULK, Opcode.ABORT})", FRAMES, "an ABORT of any length is read"),
    # Credentials
    Fault(W + "hello.py", "    if verdict is not Verdict.WELCOME:", "    if False:", PROOF, "a connection from another host needs no TLS"),
    Fault(W + "hello.py", " or grant.role < service.role", "", PROOF, "a lesser role opens every service"),
    Fault(W + "hello.py", " and not grant.lease", "", PROOF, "a lease's credential opens stores"),
    Fault("agent/rankmesh_agent/net/tls.py", "ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE", "ssl.CERT_NONE", PROOF, "ranks need no certificate"),
    Fault("agent/rankmesh_agent/net/tls.py", "private_network() if beyond else is_trusted_listener(numeric, port)", "True", PROOF + " agent/net/test_tls.py", "no connection has TLS"),
    Fault("agent/rankmesh_agent/net/tls.py", "return bool(token) and beyond and not private_network()", "return False", "hosts/test_bearer.py", "a server accepts all connections without TLS"),
    Fault("agent/rankmesh_agent/http/middleware.py", "if in_clear or held.role < needed:", "if in_clear or held.role > needed:", PROOF, "a role has no limit"),
    # torch's store at the gateway
    Fault("gateway/rankmesh_gateway/torch_store.py", "self._private_network and isinstance(error, PeerNotLocalError)", "self._private_network", TORCH_STORE, "other users are served where the network is private"),
    Fault("gateway/rankmesh_gateway/torch_store.py", "            if not client.missing:", "            if True:", TORCH_STORE, "a wait ends with the first of its keys"),
    Fault("gateway/rankmesh_gateway/torch_store.py", "self._wake(key, 1)", "self._wake(key)", TORCH_STORE, "one pushed value ends all waits for the queue"),
    Fault("gateway/rankmesh_gateway/torch_store.py", "min(most, self._unused_bytes)", "1 << 62", TORCH_STORE, "a client announces any size"),
    # Messages
    Fault(P + "engine.py", "if self._taken % TAKE_INTERVAL == 0:", "if False:", MATCHING, "ranks that never wait learn of no failure"),
    Fault(P + "matching.py", " and self.receives.first(source, tag) is None", "", MATCHING, "a receive takes the message of an earlier one"),
    Fault(P + "matching.py", " and cost <= credit.available:", ":", MATCHING, "eager messages fill the receiver's memory"),
    Fault(P + "message_queues.py", "return next(iter(queue)) if queue", "return next(reversed(queue)) if queue", MATCHING, "messages overtake each other"),
    Fault(P + "message_queues.py", "return min(named[0], wild[0]", "return max(named[0], wild[0]", QUEUES, "receives overtake each other"),
    Fault(P + "matching.py", "if credit.unreturned < WINDOW // 4:", "if credit.unreturned < 2 * WINDOW:", MATCHING, "credit is never given back"),
    Fault(P + "matching.py", "min(WINDOW, credit.available + header.total)", "credit.available + header.total", MATCHING, "a peer gives credit without end"),
    Fault(P + "matching.py", ".available += max(header.length, _MIN_COST)", ".available += 0", MATCHING, "a cancelled send costs credit for good"),
    Fault(P + "matching.py", "self.receives.restore(waiting)", "self.receives.post(waiting)", MATCHING, "a withdrawn message costs a receive its place"),
    Fault(P + "matching.py", "            self.on_misfit(why)", "            pass", MATCHING, "the sender of a refused message is not told"),
    Fault(P + "message_queues.py", "return dtype == self.dtype and nbytes", "return nbytes", MATCHING + " agent/group", "a message of another dtype is taken"),
    Fault(P + "matching.py", "max(len(view), _MIN_COST)", "len(view)", MATCHING, "empty messages cost nothing"),
    Fault(P + "matching.py", "self.latest[source] + 1", "self.latest[source]", LONG, "no announcement is the one expected"),
    Fault(P + "framing.py", "frames.decode(header), into, received", "frames.decode(header), into, 0", LONG, "the rest of a message is written over its beginning"),
    # The ranks that hold up a call
    Fault(P + "status.py", "(item[0].fingerprint == DIFFERENT) == differs", "True", STATUS, "a description goes when its rank goes on"),
    Fault(P + "status.py", " if status.seq >= self.oldest]", "]", STATUS, "reports have all earlier calls"),
    Fault(P + "status.py", " and not self._few:", ":", STATUS, "few ranks pass on each other's reports"),
    Fault(P + "wait_graph.py", "unreachable or silent or absent or unknown", "unreachable or absent or silent or unknown", STATUS, "a rank that waits for a stopped one is blamed"),
    # Calls of a group, in order
    Fault(GROUP + "call_queue.py", "and not self._queued and self._turn.acquire(False):", "and self._turn.acquire(False):", QUEUE, "a call overtakes those in the queue"),
    Fault(GROUP + "call_queue.py", "self.worker is not None and threading.current_thread() is self.worker:\n            name", "False:\n            name", QUEUE, "a callback waits for itself"),
    Fault(GROUP + "call_queue.py", "except CollectiveMismatchError:", "except ZeroDivisionError:", GROUPS, "a mismatch ends the group"),
    Fault(GROUP + "call_queue.py", "state.abort(error)\n                raise", "raise", GROUPS, "a failed call does not end the group"),
    Fault(GROUP + "call_queue.py", "self._state.abort(error)  #", "pass  #", QUEUE, "Ctrl-C leaves a queued call running"),
    Fault(GROUP + "call_queue.py", "            self._queue.put(None)", "            pass", GROUPS, "the worker thread stays"),
    Fault(GROUP + "call_queue.py", "stats.failures += 1", "pass", GROUPS, "failures are not counted"),
    Fault(GROUP + "call_queue.py", "            state.started_at = None", "            pass", GROUPS, "a call that ended is shown as under way"),
    # State of a group
    Fault(GROUP + "local_state.py", "            self.abort(failure)", "            pass", FAILURE, "members are not told of a loss before this rank leaves"),
    Fault(GROUP + "local_state.py", "[] if any_will_do and len(gone) < len(ranks) else gone", "gone", FAILURE, "a receive from any rank ends with the first that is gone"),
    Fault(GROUP + "local_state.py", "not self.engine.lost_peers[rank].clean and", "", FAILURE, "a goodbye ends the group"),
    Fault(GROUP + "state.py", "            if self.failure is None:\n                self.failure, ", "            if True:\n                self.failure, ", FAILURE, "a later failure hides the first"),
    Fault(GROUP + "local_state.py", "if own or isinstance(error, CollectiveTimeoutError):", "if own:", FAILURE, "members report our deadline as theirs"),
    Fault(GROUP + "local_state.py", "own = type(error) is DistBackendError or", "own =", GPU_FAILURE, "the rank whose library fails is not named"),
    Fault(GROUP + "local_state.py", "for rank in self.ranks if rank not in missing", "for rank in self.ranks if rank in missing", FAILURE, "an error says that the missing have arrived"),
    Fault(GROUP + "local_state.py", 'f"{who} left ({cause or', 'f"{who} failed ({cause or', FAILURE, "a rank that left is said to have failed"),
    # Arrays on GPUs
    Fault(GROUP + "call_monitor.py", "if any(self._reported < report.seq <= seq for", "if any(self._reported < report.seq < seq for", GPU_FAILURE, "ranks that made the call are missing"),
    Fault(GPU + "selection.py", "allowed = all(", "allowed = any(", "gpu/test_selection.py", "one rank allows all to share a GPU"),
    Fault(GPU + "nccl.py", "yield how._replace(op=own)", "yield how._replace(op=0)", "gpu/test_results.py", "PREMUL_SUM only adds"),
    Fault(CALLS + "p2p.py", "for one in sorted(p2p_op_list, key=lambda one: sorted((me, me if one.group_peer is None else one.group_peer))):", "for one in p2p_op_list:", "gpu/test_multigpu.py", "pairs of ranks wait for each other in a circle"),
    Fault(GPU + "watchdog.py", "            if launch.ended:", "            if True:", "agent/gpu gpu/test_streams.py", "futures complete before the GPU has"),
    Fault(GPU + "communicator.py", "launch_options, launches=True)", "launch_options)", "gpu/test_streams.py", "a thread enqueues NCCL's asynchronous calls"),
    # The store
    Fault(STORE + "table.py", "completed = [watch for watch in touched if not watch.missing]", "completed = list(touched)", TABLE, "a wait for two keys ends with the first"),
    Fault(STORE + "table.py", "watch.missing.add(key)", "pass", TABLE, "a deleted key counts as there"),
    Fault(STORE + "table.py", "(queue.appendleft if first else queue.append)", "(queue.append)", TABLE, "a value that is put back goes to the end"),
    Fault(STORE + "table.py", "            if not queue:\n                del", "            if False:\n                del", TABLE, "an empty queue counts as there"),
    Fault(STORE + "table.py", "                pops.pop(pop, None)", "                pass", TABLE, "who stopped waiting is kept"),
    Fault(STORE + "table.py", "if pop.set_running_or_notify_cancel():", "if True:", TABLE, "a value goes to somebody who stopped waiting"),
    Fault(STORE + "table.py", "        self._closed = True\n        with", "        with", TABLE, "who waits after the end waits for ever"),
    Fault(STORE + "replies.py", "request_id.keyed and number != request_id.number", "False", TABLE, "a name answers another request"),
    Fault(STORE + "replies.py", "len(self._entries) < MAX_REPLIES and ", "", TABLE, "answers are kept without end"),
    Fault(STORE + "replies.py", "if self._bytes > MAX_REPLY_BYTES:", "if False:", TABLE, "large answers are kept without end"),
    Fault(STATE + "job_stores.py", "if store not in used", "if True", GATEWAY, "a store goes while its ranks live"),
    Fault(STATE + "job_stores.py", "self._registry.has_unknown_store(job) or ", "", GATEWAY, "a store goes although a rank that uses it lives"),
    Fault(STATE + "registry_file.py", 'database.execute("ROLLBACK")', "pass", GATEWAY, "a change that failed is made with the next"),
    # The gateway's registry
    Fault(STATE + "rank.py", "return self.silence(now) < failed_seconds(self.interval)", "return self.silence(now) < 10 * failed_seconds(self.interval)", GATEWAY, "a silent rank fails too late"),
    Fault(STATE + "epoch.py", " and lost_by[record.member.rank] >= len(watching)", "", GATEWAY, "a stopped process fails although its peers are connected to it"),
    Fault(STATE + "job.py", "if not record.is_live():", "if False:", GATEWAY, "a heartbeat revives a failed rank"),
    Fault(STATE + "registry.py", "if self._scans_expected and pause >= _PAUSE_SECONDS:", "if False:", GATEWAY, "a gateway that was suspended declares all ranks failed"),
    Fault(STATE + "rank.py", "if self.ended is not None or self.joining:", "if self.joining:", GATEWAY, "the second report of a loss replaces the first"),
    Fault(STATE + "rank.py", "        if self.exited:\n            return\n", "", GATEWAY, "a second goodbye replaces the first"),
    Fault(STATE + "job.py", "if joined is not None:", "if False:", GATEWAY, "a repeated join is another rank's"),
    Fault(STATE + "job.py", "(self.epochs and beat.epoch < self._latest_number()):", "False:", GATEWAY, "a heartbeat revives a world that is over"),
    Fault(STATE + "job.py", "if number == latest or epoch.live_ranks()", "if number == latest", GATEWAY, "a world that still runs is forgotten"),
    Fault(STATE + "job.py", "epoch.number = self._next_number()", "pass", GATEWAY, "two worlds have one epoch"),
    Fault(STATE + "registry.py", ", if_idle=True", "", GATEWAY, "a second connection's joiner loses its place"),
    Fault(STATE + "registry.py", "        if len(self._jobs) >= MAX_JOBS:\n            raise", "        if False:\n            raise", GATEWAY, "jobs are kept without end"),
    Fault(STATE + "groups.py", "if len(found) > 1:  #", "if False:  #", GATEWAY, "a group of a world that is over makes a name ambiguous"),
    Fault(STATE + "registry.py", "        _cancel(waiters)\n        self.events", "        self.events", GATEWAY, "joiners wait on when the registry is closed"),
    Fault(STATE + "epoch.py", "record.joining, record.last_seen = False, now", "record.joining = False", GATEWAY, "ranks that waited long are suspect at once"),
    Fault(STATE + "epoch.py", "if record is not reporter and record.fail(", "if record.fail(", GATEWAY, "a rank reports its own loss"),
    Fault(STATE + "epoch.py", "record is None or each.rank in before", "record is None", GATEWAY, "an old report ends a rank that came back"),
    Fault(STATE + "epoch.py", "> JOIN_SILENCE_SECONDS and not each.waiters", "> JOIN_SILENCE_SECONDS", GATEWAY, "a joiner that waits is forgotten"),
    Fault(STATE + "groups.py", "max(merged.operations_rate, rate.operations)", "merged.operations_rate + rate.operations", GATEWAY, "an operation counts once a rank"),
    Fault(STATE + "groups.py", "if number < seq]", "if number <= seq]", GATEWAY, "ranks that arrived are shown as missing"),
    # Arguments of calls
    Fault(CALLS + "arguments.py", "if rank is not None and group_rank is not None:", "if False:", WRONG, "a root that is given twice is the second one"),
    Fault(CALLS + "arguments.py", "    if found == comm.rank:\n", "    if False:\n", WRONG, "a process waits for its own message"),
    Fault(CALLS + "arguments.py", "    if not is_root and tensors is not None and len(tensors):", "    if False:", WRONG, "a list that is not the root's is ignored"),
    Fault(CALLS + "arguments.py", "    if size is not None and len(items) != size:", "    if size is not None and len(items) < size:", WRONG, "a list may have more items than there are ranks"),
    Fault(CALLS + "p2p.py", "    if not -(1 << 63) <= tag < 1 << 63:", "    if not tag < 1 << 63:", WRONG, "a tag below 64 bits ends in a struct.error"),
    Fault(CALLS + "p2p.py", "        if op is not isend and op is not irecv:", "        if not callable(op):", WRONG, "a batch has messages that block"),
    Fault(CALLS + "coalescing.py", "        if len(outputs) != len(input_tensor_list):", "        if False:", WRONG, "arrays of a batch are left out"),
    Fault(CALLS + "multigpu.py", "    if not 0 <= as_int(number, name) < len(arrays):", "    if not as_int(number, name) < len(arrays):", WRONG, "the array before the first one is the last one"),
    Fault(CALLS + "multigpu.py", "    if count is not None and len(arrays) != count:", "    if False:", WRONG, "there are more outputs than inputs"),
    Fault(CALLS + "objects.py", "    elif object_gather_list:\n", "    elif False:\n", WRONG, "a list that is not the destination's is ignored"),
    Fault(CALLS + "objects.py", "or not scatter_object_output_list:", "or False:", WRONG, "an object has no place"),
    Fault(CALLS + "barrier.py", "not isinstance(device_ids, list | tuple):", "False:", WRONG, "a device is no list"),
    Fault("sdk/rankmesh/_session/ranks.py", "if isinstance(number, bool) or not", "if not", WRONG, "True is a rank"),
    Fault("sdk/rankmesh/_session/session.py", "    if not isinstance(group, ProcessGroup):", "    if False:", WRONG, "a name as the group ends in an AttributeError"),
    Fault("agent/rankmesh_agent/http/routes/group_calls.py", "        gt=0, le=MAX_SECONDS,", "        le=MAX_SECONDS,", "agent/group/test_wrong_calls.py", "a negative timeout over HTTP ends the group"),
    # Objects as bytes
    Fault(CALLS + "plain.py", "- len(set(map(hash, keys))) > _COLLISIONS:", "< 0:", PLAIN, "keys of one hash take for ever"),
    Fault(CALLS + "plain.py", "        if unused:", "        if False:", PLAIN, "a kind arrives as a value"),
    Fault(CALLS + "plain.py", 'if dtype.kind == "b" and', 'if dtype.kind == "?" and', PLAIN, "a bool that is neither True nor False"),
    Fault(CALLS + "plain.py", "value.tzinfo is not None and value.tzinfo is not UTC", "False", PLAIN, "a time zone is lost"),
    Fault(CALLS + "plain.py", '"surrogatepass"', '"replace"', PLAIN, "lone surrogates become question marks"),
    Fault(CALLS + "plain.py", "bit_length() // 8 + 1", "bit_length() // 8 + (value.bit_length() % 8 > 0)", PLAIN, "integers of full bytes change their sign"),
    Fault(CALLS + "serialize.py", '.copy("K"))', ")", SERIALIZE, "an array cannot be changed"),
    Fault(CALLS + "serialize.py", "or len(apart) == MAX_APART:", "or False:", SERIALIZE, "a record has no place for a size"),
    Fault(CALLS + "serialize.py", "    if refusal := _pickle_refusal(weights_only):\n        raise Protocol", "    if False:\n        raise Protocol", SERIALIZE, "a rank that must not read a pickle runs its code"),
    # The launcher
    Fault(LAUNCHER + "supervisor.py", "item[1].signal is None", "0", LAUNCH, "the rank that a signal killed is not the first to fail"),
    Fault(LAUNCHER + "rank.py", "            self.sent = number\n", "            pass\n", LAUNCH, "Ctrl-C is reported as a rank's failure"),
    Fault(LAUNCHER + "supervisor.py", "elif number == signal.SIGINT:", "elif False:", LAUNCH, "a second Ctrl-C does nothing"),
    Fault(LAUNCHER + "supervisor.py", "        if self._terminate_at is None:\n", "        if False:\n", LAUNCH, "the others run on after a failure"),
    Fault(LAUNCHER + "supervisor.py", "return 128 + self.signal\n", "return 0\n", LAUNCH, "a job that a signal ended succeeds"),
    Fault(LAUNCHER + "supervisor.py", "            stream.read_all()  # its last output precedes the message\n        failure", "            pass\n        failure", LAUNCH, "a rank's last words come after ours"),
    Fault(LAUNCHER + "rank.py", "else 128 + (self.signal or 0)", "else 1", LAUNCH, "the exit code does not tell the signal"),
    Fault(LAUNCHER + "rank.py", "            self.send(signal.SIGKILL)\n", "            pass\n", LAUNCH, "what a rank started stays"),
    Fault(LAUNCHER + "rank.py", "os.killpg(self.pid, signal.SIGCONT)", "pass", LAUNCH, "a stopped rank does not receive SIGTERM"),
    Fault(LAUNCHER + "supervisor.py", "only_holders=self._succeeded(rank)", "only_holders=False", LAUNCH, "an upload that a rank has started is killed"),
    Fault(LAUNCHER + "supervisor.py", "return OUTPUT_LOST if any(lost)", "return 0 if any(lost)", LAUNCH, "output that is lost is a success"),
    Fault("agent/rankmesh_agent/net/inherited.py", "    signal.pthread_sigmask(signal.SIG_SETMASK, ())\n", "", "sdk/launcher/test_inherited.py", "blocked signals end nothing"),
    Fault(LAUNCHER + "rank.py", "maxlen=TAIL_LINES", "maxlen=None", LAUNCH, "the report repeats all output"),
    Fault(LAUNCHER + "output.py", 'b"\\r" * returned', 'b""', LINES, "a carriage return between two reads is lost"),
    Fault(LAUNCHER + "output.py", "while len(self._rest) > self._longest:", "while False:", LINES, "a line without end eats the memory"),
    Fault(LAUNCHER + "plan.py", '"LOCAL_RANK": str(rank - self.ranks.start)', '"LOCAL_RANK": str(rank)', "sdk/launcher/test_nodes.py sdk/launcher/test_arguments.py sdk/launcher/test_processes.py", "LOCAL_RANK is the rank on the second node"),
    Fault(LAUNCHER + "plan.py", "if options.nproc > 1:", "if False:", LAUNCH, "every rank's BLAS takes all cores"),
    Fault(LAUNCHER + "output.py", "            self._gone = True\n", "            raise\n", LAUNCH, "a log viewer that goes ends the job"),
    Fault(LAUNCHER + "signals.py", "if signal.getsignal(number) is not signal.SIG_IGN", "if True", "sdk/launcher/test_signals.py sdk/launcher/test_processes.py", "nohup is in vain"),
    Fault(LAUNCHER + "gateway.py", "self._gateway.registry.process_exited(", "str(", LAUNCH + " sdk/test_killed_rank.py", "the gateway is not told how a rank ended"),
    Fault("agent/rankmesh_agent/net/interrupts.py", "            if self._frames:", "            if False:", "sdk/launcher/test_multiprocessing.py agent/net/test_interrupts.py", "Ctrl-C during a start is lost"),
    Fault(LAUNCHER + "failure.py", "cause if cause is not None and self.has_failed(self.cause) else first", "first", LAUNCH, "the launcher reports the rank that exits first"),
    # The compiled core
    Fault(N + "core.pyx", "            self.segment._turn ^= 1\n", "            self.segment._turn = 1\n", CORE, "a slot is written while it is read"),
    Fault(N + "core.pyx", "own.fingerprints[self.seq & 1] =", "own.fingerprints[0] =", CORE_CALLS, "every second fingerprint is the one before"),
    Fault(N + "core.pyx", "self.lines[rank].fingerprints[word] != fingerprint", "fingerprint == 0", CORE, "different calls go unnoticed"),
    Fault(N + "core.pyx", "plan.kind == ALL_TO_ALL and memcmp(", "plan.kind < 0 and memcmp(", CORE, "lengths that do not fit go unnoticed"),
    Fault(N + "core.pyx", "if spin(&line.count, steps, self", "if spin(&line.count, steps - 1, self", CORE, "a rank does not wait for the last step"),
    Fault(N + "core.pyx", "        self.segment._steps -= 1\n", "", CORE, "a step that Python resumes is counted twice"),
    Fault(N + "core.pyx", "        if sleepers or load_acquire(&own.sleepers):\n", "        if load_acquire(&own.sleepers):\n", CORE_CALLS, "a sleeper whose flag is cleared is not woken"),
    Fault(N + "core.pyx", "            wake_sleepers(&own.count)\n", "            pass\n", CORE_CALLS, "sleepers are not woken"),
    Fault(N + "core.pyx", "            store_release(&line.sleepers, 1)\n", "", CORE_CALLS, "nobody learns that a rank sleeps"),
    Fault(N + "core.pyx", "if plan.inputs == 1 and self.rank < 2:", "if plan.inputs == 1 and self.rank < 3:", CORE, "rank 2 reduces an array that it overwrites"),
    Fault(N + "core.pyx", "slot + i * plan.lane", "slot + i * nbytes", CORE, "a rank finds its part at another place"),
    Fault(N + "core.pyx", "array.flags & flags != flags", "False", CORE_CALLS, "a read-only array is written"),
    Fault(N + "core.pyx", "            if array.dimensions[0] != self.count * parts:\n                return False\n", "", CORE_CALLS, "the end of a longer array stays as it was"),
    Fault(N + "core.pyx", "options[3] is not None or self.state.failure is not None", "options[3] is not None", CORE_CALLS, "a call begins after the group's end"),
    Fault(N + "reductions.pxi", "(bits + 0x7fff + (bits >> 16 & 1)) >> 16", "(bits + 0x8000) >> 16", CORE_BITS, "ties of bfloat16 are rounded up"),
    Fault(N + "reductions.pxi", "0xfff + (size >> 13 & 1)", "0x1000", CORE_BITS, "ties of float16 are rounded up"),
    Fault(N + "reductions.pxi", "            if largest:", "            if not largest:", CORE_BITS, "MAX gives the minimum"),
    Fault(N + "reductions.pxi", "bits_of(one) ^ bits_of(other);", "0;", CORE_BITS, "MIN of zeros has another sign"),
    Fault(N + "reductions.pxi", "    return not nan\n", "    return True\n", CORE_BITS, "NaN has other bits"),
    Fault(N + "reductions.pxi", "                special |= (part[i] & 0x7c00) == 0x7c00\n", "", CORE_BITS, "infinity of float16 becomes a number"),
    Fault(N + "messages.pxi", "min(nbytes, self.capacity - at)", "nbytes", CORE_MESSAGES, "a message crosses the ring's end"),
    Fault(N + "messages.pxi", "self.acquire(False) is not True", "False", CORE_MESSAGES, "a message is written beside another thread's"),
    Fault(N + "messages.pxi", "type(tag) is not int or self.state.failure is not None", "type(tag) is not int", CORE_MESSAGES, "a message is sent after the group's end"),
    Fault(N + "messages.pxi", "or len(message.peer.outgoing) or", "or", CORE_MESSAGES, "a message overtakes those that are queued"),
    Fault(N + "messages.pxi", " or message.cost > message.credit.available:", ":", CORE_MESSAGES, "messages fill the receiver's memory"),
    Fault(N + "messages.pxi", " or end - read > ring.capacity:", ":", CORE_MESSAGES, "a message overwrites those that are not read yet"),
    Fault(N + "messages.pxi", "            (<object>rings)._ring_doorbell(ring, READER_SLEEPS)\n", "            pass\n", CORE_MESSAGES, "a rank that sleeps is not woken by a message"),
    Fault(N + "messages.pxi", "self.engine.driven or len(self.posted) or", "self.engine.driven or", CORE_MESSAGES, "a receive overtakes one that was posted before"),
    Fault(N + "messages.pxi", "        if peer._begin != peer._end or peer._header is not None or peer._to_discard:\n            return False\n", "", CORE_MESSAGES, "a message is found in another one's bytes"),
    Fault(N + "messages.pxi", "        if memcmp(header, <char *>message.header, HEADER_BYTES):\n            return False\n", "", CORE_MESSAGES, "another message is received"),
    Fault(N + "messages.pxi", "        message.credit.unreturned += message.cost\n", "", CORE_MESSAGES, "credit is never returned"),
    Fault(N + "records.pxi", "        self.nbytes += nbytes\n", "", f"{CORE} -k counted", "bytes are not counted"),
    Fault(N + "records.pxi", "            self.count += 1\n", "", f"{CORE} -k counted", "calls are not recorded"),
    # Access without a token, and files
    Fault("agent/rankmesh_agent/net/peer_credentials.py", "        if int(inode):", "        if True:", PEERS, "a closed connection counts as root's (/proc)"),
    Fault("agent/rankmesh_agent/net/peer_credentials.py", "    if uid not in (own, 0):", "    if False:", PEERS, "all users are served"),
    Fault("agent/rankmesh_agent/http/middleware.py", 'refusal is not None and scope["path"] not in OPEN_PATHS', "False", PEERS, "all paths are open to other users"),
    Fault(SESSIONS, "grant.role is Role.RUN and scope", "scope", LINK_CODE, "a link to read shows the stacks of ranks"),
    Fault(SESSIONS, "        self._codes.remove(code)\n", "", LINK_CODE, "a code opens the dashboard twice"),
    Fault(SESSIONS, ' or scope["path"] == CODES_PATH', "", LINK_CODE, "a session renews itself"),
    Fault(SESSIONS, ' or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):', ":", LINK_CODE, "another port's page uses the session's cookie"),
    Fault(SESSIONS, "return grant if self._clock() < end else None", "return grant", LINK_CODE, "sessions do not expire"),
    Fault("sdk/rankmesh/_rendezvous/file.py", "if found.st_uid != os.geteuid():", "if False:", "security/test_files.py", "another user's file names the gateway"),
    Fault("sdk/rankmesh/_rendezvous/file.py", "except ForeignFileError as error:", "except ZeroDivisionError as error:", "security/test_files.py", "a file of other content is not refused"),
    Fault("sdk/rankmesh/_rendezvous/file.py", "if stat.S_ISLNK(found.st_mode):", "if False:", "security/test_files.py", "a symbolic link is not named"),
]
# fmt: on


class Outcome(NamedTuple):
    """What became of a fault: ``killed``, ``survived``, ``hung`` or ``stale``, by which test, after how many seconds."""

    fault: Fault
    state: str
    by: str
    seconds: float


without_fault: dict[str, tuple[str, str]] = {}
"""What the tests of faults do without any: they have to pass."""


def plant(tree: Path, fault: Fault, number: int, given: argparse.Namespace) -> Outcome:
    """Plant a fault in the tree, run its tests and take it out again."""
    path, core = tree / fault.file, tree / N / "core.abi3.so"
    compiled = fault.file.startswith(N) and path.suffix != ".py"
    native = "1" if compiled else given.native
    before = path.read_text() if path.exists() else ""
    if before.count(fault.old) != 1:
        return Outcome(fault, "stale", f"the old text occurs {before.count(fault.old)} times", 0.0)
    key = fault.tests, native
    if key not in without_fault:
        without_fault[key] = run(tree, fault.tests, native, given)
    if without_fault[key][0] != "survived":
        return Outcome(fault, "stale", f"without it: {without_fault[key]}", 0.0)
    stat, built = path.stat(), core.read_bytes() if compiled else b""
    begun = time.monotonic()
    try:
        path.write_text(before.replace(fault.old, fault.new))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + (number + 1) * 10**9))  # what compiled code goes by
        if compiled:
            subprocess.run([sys.executable, "hatch_build.py"], cwd=tree, stdout=subprocess.DEVNULL)
        compiles = not compiled or core.exists()
        state, by = run(tree, fault.tests, native, given) if compiles else ("stale", "it does not compile")
    finally:
        path.write_text(before)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        end_leftovers()
        if compiled:
            core.write_bytes(built)
    return Outcome(fault, state, by, time.monotonic() - begun)


def run(tree: Path, tests: str, native: str, given: argparse.Namespace) -> tuple[str, str]:
    """Run some tests; return the outcome, and the test that failed."""
    arguments = [
        f"tests/{each}" if (tree / "tests" / each.partition("::")[0]).exists() else each for each in shlex.split(tests)
    ]
    missing = [each for each in arguments if each.endswith(".py") and not each.startswith("tests/")]
    if missing:
        return "stale", f"no such tests: {missing}"
    parallel = ["-n", str(given.jobs), "--dist", "loadfile"] if given.jobs > 1 else []
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        "-p",
        "support.no_shrinking",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(tree / each) for each in COPIED[:4])}
    environment["RANKMESH_NATIVE"] = native
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*command, *parallel, *arguments], cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(given.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "hung", f"after {given.limit:g} s"
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    if code == 0:
        return "survived", next((line for line in reversed(lines) if "passed" in line), "")
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if code == 5 or (code != 1 and not failed):  # no tests, or wrong arguments
        return "stale", " ".join(lines[-3:])
    return "killed", failed[0].split(" - ")[0].removeprefix("FAILED ").removeprefix("ERROR ") if failed else lines[-1]


def end_leftovers() -> None:
    """Kill the processes that the tests left to this one, which is the reaper of what they started."""
    for _ in range(20):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not children:
            return
        for child in children:
            os.kill(int(child), signal.SIGKILL)
            os.waitpid(int(child), 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="faults whose number, file or why match, e.g. '*table*'"
    )
    parser.add_argument("--list", action="store_true", help="print the faults, and which are stale; run nothing")
    parser.add_argument("--json", metavar="FILE", help="write the outcomes to a file")
    parser.add_argument("--limit", type=float, default=240.0, metavar="S", help="seconds for the tests of a fault")
    parser.add_argument("--native", default="0", choices="01", help="whether the tests of Python's faults use the core")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="pytest-xdist workers")
    given = parser.parse_args()
    chosen = [
        (number, fault)
        for number, fault in enumerate(FAULTS)
        if any(fnmatch.fnmatch(text, given.only) for text in (str(number), fault.file, fault.why))
    ]
    if given.list:
        for number, fault in chosen:
            stale = "" if (ROOT / fault.file).read_text().count(fault.old) == 1 else "  STALE"
            print(f"{number:3} {fault.file}: {fault.why}{stale}")
        return 0
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        for number, fault in chosen:
            outcome = plant(tree, fault, number, given)
            outcomes.append(outcome)
            print(f"{outcome.state:8} {number:3} {fault.file}: {fault.why}\n             {outcome.by}", flush=True)
            if given.json:
                rows = [
                    {"number": n, **o.fault._asdict(), "state": o.state, "by": o.by, "seconds": round(o.seconds, 1)}
                    for (n, _), o in zip(chosen, outcomes, strict=False)
                ]
                Path(given.json).write_text(json.dumps(rows, indent=1))
    counted = {state: sum(o.state == state for o in outcomes) for state in ("killed", "survived", "hung", "stale")}
    print(", ".join(f"{count} {state}" for state, count in counted.items()))
    return min(100, len(outcomes) - counted["killed"])


if __name__ == "__main__":
    sys.exit(main())
