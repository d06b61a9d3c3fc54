"""Faults that operators of tools/mutate.py hardly make, and that tests have to notice: ``python tests/mutants.py``.

Races, orders, changes that are not undone, and access without a check. Each fault replaces one piece of source text in
a copy of the tree and runs the tests that should fail. It is *killed*, *survived* or *hung* as a mutant is, and *stale*
when the old text does not occur exactly once, or the tests fail without it.

The tests of faults in the Python code run without the compiled core, or by ``--native 1`` with it. Faults in the core
itself are compiled, in some ten seconds. What only other processors reorder, loads and stores without acquire, release
and fence, no test on x86 can see, and a fence before a sleep of one slice costs its time at most.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import functools
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
C = "agent/rankmesh_agent/collectives/"
T = "agent/rankmesh_agent/transports/"
S = "agent/rankmesh_agent/shared_memory/"
N = "agent/rankmesh_agent/native/"
P = "agent/rankmesh_agent/progress/"
GROUP = "agent/rankmesh_agent/group/"
GPU = "agent/rankmesh_agent/gpu/"
STATE = "gateway/rankmesh_gateway/state/"
CALLS = "sdk/rankmesh/_collectives/"
LAUNCHER = "sdk/rankmesh/_launcher/"
SWEEP = "agent/collectives/test_sweep.py"
DIRECT = f"agent/collectives/test_direct.py {SWEEP} -k 'test_direct or registered or reads'"
CORE_MESSAGES = "agent/native/test_messages.py security/test_hostile_ring.py"
RING = "agent/transports/test_shm_ring.py agent/transports/test_conformance.py"
PROOF = "security/test_authority.py security/test_hello.py security/test_credentials.py security/test_roles.py"
MATCHING = "agent/progress/test_matching.py"
GATEWAY = "gateway/state"
LAUNCH = "sdk/launcher/test_processes.py sdk/launcher/test_output.py sdk/launcher/test_failure.py"
SESSIONS = "gateway/rankmesh_gateway/http/dashboard_sessions.py"
LINK_CODE = "security/test_dashboard_sessions.py"


class Fault(NamedTuple):
    """A fault: where, the text before and after, the tests that have to fail, and what goes wrong with it."""

    file: str
    old: str
    new: str
    tests: str
    why: str

    def is_stale(self) -> bool:
        return (ROOT / self.file).read_text().count(self.old) != 1


# fmt: off
FAULTS = [
    Fault(C + "reduction.py", "ReduceOp.MIN: np.minimum", "ReduceOp.MIN: np.fmin", f"agent/collectives/test_reduction.py {SWEEP} -k 'test_reduction or segment'", "MIN loses NaN"),
    Fault(C + "reduction.py", "for part in parts[2:]:\n            ufunc(out, part, out=out)\n        return", "for part in parts[:1:-1]:\n            ufunc(out, part, out=out)\n        return", "agent/collectives", "not in rank order"),
    Fault(C + "reduce_scatter.py", "not np.may_share_memory(output, part) else", "True else", DIRECT, "others read inputs that are overwritten"),
    Fault(C + "reduce_scatter.py", "rows[number % 2, other, :count]", "rows[0, other, :count]", f"{SWEEP} -k link", "the next piece lands where this one is read"),
    Fault(C + "rounds.py", "merge(received, payload) if partner < place else merge(payload, received)", "merge(payload, received)", "agent/collectives", "ranks reduce in different orders"),
    Fault(S + "slots.py", "self._word = 1 + (seq & 1)", "self._word = 1", "agent/shared_memory/test_segment.py agent/group", "a fingerprint is overwritten while it is read"),
    Fault(S + "segment.py", "self.step(exposure.readers)", "self.step([])", DIRECT, "an array changes while it is read"),
    Fault("agent/rankmesh_agent/backends/cpu.py", "segment.make_arrays_private(arguments)", "pass", "sdk/collectives/test_shared_memory.py -k late", "a late rank writes into arrays of a call that has failed"),
    Fault("agent/rankmesh_agent/remote/staging.py", "seals & ~_SEAL_EXEC != _SEALS or ", "", "agent/remote/test_staging.py security/test_hostile_staging.py", "an attached process may cut off the memory that its agent uses"),
    Fault(S + "orphans.py", "            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "", "agent/shared_memory/test_mapping.py", "memory of a process that lives is removed"),
    Fault(T + "shm_ring.py", "return not self.has_work(writing, reading)", "return True", RING, "data that came before sleep is not seen"),
    Fault(T + "shm_ring.py", "(self._generation + 1) %", "self._generation %", RING + " " + "agent/group/test_p2p_read.py", "changed bytes are taken for the message"),
    Fault("agent/rankmesh_agent/wire/hello.py", "    if verdict is not Verdict.WELCOME:", "    if False:", PROOF, "a connection from another host needs no TLS"),
    Fault("agent/rankmesh_agent/net/tls.py", "ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE", "ssl.CERT_NONE", PROOF, "ranks need no certificate"),
    Fault(P + "message_queues.py", "return next(iter(queue)) if queue", "return next(reversed(queue)) if queue", MATCHING, "messages overtake each other"),
    Fault(P + "message_queues.py", "return min(named[0], wild[0]", "return max(named[0], wild[0]", "agent/progress/test_message_queues.py", "receives overtake each other"),
    Fault(P + "matching.py", "min(WINDOW, credit.available + header.total)", "credit.available + header.total", MATCHING, "a peer gives credit without end"),
    Fault(P + "matching.py", "self.receives.restore(waiting)", "self.receives.post(waiting)", MATCHING, "a withdrawn message costs a receive its place"),
    Fault(P + "wait_graph.py", "unreachable or silent or absent or unknown", "unreachable or absent or silent or unknown", "agent/progress/test_status.py agent/progress/test_wait_graph.py -k 'not mismatch_names and not ahead and not missing_ranks'", "a rank that waits for a stopped one is blamed"),
    Fault(GROUP + "call_queue.py", "and not self._queued and self._turn.acquire(False):", "and self._turn.acquire(False):", "agent/group/test_call_queue.py agent/group/test_work.py", "a call overtakes those in the queue"),
    Fault(GROUP + "state.py", "            if self.failure is None:\n                self.failure, ", "            if True:\n                self.failure, ", "agent/group agent/progress sdk/test_failures.py", "a later failure hides the first"),
    Fault(CALLS + "p2p.py", "for one in sorted(p2p_op_list, key=lambda one: sorted((me, me if one.group_peer is None else one.group_peer))):", "for one in p2p_op_list:", "gpu/test_multigpu.py", "pairs of ranks wait for each other in a circle"),
    Fault(GPU + "watchdog.py", "            if launch.ended:", "            if True:", "agent/gpu gpu/test_streams.py", "futures complete before the GPU has"),
    Fault("agent/rankmesh_agent/store/table.py", "if pop.set_running_or_notify_cancel():", "if True:", "agent/store/test_table.py agent/store/test_stores.py agent/store/test_server.py agent/store/test_pending_calls.py", "a value goes to somebody who stopped waiting"),
    Fault(STATE + "job_stores.py", "self._registry.has_unknown_store(job) or ", "", GATEWAY, "a store goes although a rank that uses it lives"),
    Fault(STATE + "registry_file.py", 'database.execute("ROLLBACK")', "pass", GATEWAY, "a change that failed is made with the next"),
    Fault(STATE + "registry.py", "if self._scans_expected and pause >= _PAUSE_SECONDS:", "if False:", GATEWAY, "a gateway that was suspended declares all ranks failed"),
    Fault(STATE + "registry.py", ", if_idle=True", "", GATEWAY, "a second connection's joiner loses its place"),
    Fault(STATE + "epoch.py", "record is None or each.rank in before", "record is None", GATEWAY, "an old report ends a rank that came back"),
    Fault(CALLS + "serialize.py", "    if refusal := _pickle_refusal(weights_only):\n        raise Protocol", "    if False:\n        raise Protocol", "sdk/collectives/test_serialize.py", "a rank that must not read a pickle runs its code"),
    Fault(LAUNCHER + "supervisor.py", "            stream.read_all()  # its last output precedes the message\n        failure", "            pass\n        failure", LAUNCH, "a rank's last words come after ours"),
    Fault("agent/rankmesh_agent/net/interrupts.py", "            if self._frames:", "            if False:", "sdk/launcher/test_multiprocessing.py agent/net/test_interrupts.py", "Ctrl-C during a start is lost"),
    Fault(LAUNCHER + "failure.py", "cause if cause is not None and self.has_failed(self.cause) else first", "first", LAUNCH, "the launcher reports the rank that exits first"),
    Fault(N + "messages.pxi", "min(nbytes, self.capacity - at)", "nbytes", CORE_MESSAGES, "a message crosses the ring's end"),
    Fault(N + "messages.pxi", "self.acquire(False) is not True", "False", CORE_MESSAGES, "a message is written beside another thread's"),
    Fault(N + "messages.pxi", "or len(message.peer.outgoing) or", "or", CORE_MESSAGES, "a message overtakes those that are queued"),
    Fault("agent/rankmesh_agent/net/peer_credentials.py", "    if uid not in (own, 0):", "    if False:", "agent/net/test_peer_credentials.py security/test_other_users.py", "all users are served"),
    Fault(SESSIONS, "        self._codes.remove(code)\n", "", LINK_CODE, "a code opens the dashboard twice"),
    Fault(SESSIONS, ' or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):', ":", LINK_CODE, "another port's page uses the session's cookie"),
    Fault("sdk/rankmesh/_rendezvous/file.py", "if found.st_uid != os.geteuid():", "if False:", "security/test_files.py", "another user's file names the gateway"),
]
# fmt: on


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="faults whose file or why match, as '*table*'")
    parser.add_argument("--list", action="store_true", help="print the faults, and which are stale; run nothing")
    parser.add_argument("--limit", type=float, default=240.0, metavar="S", help="seconds for the tests of a fault")
    parser.add_argument("--native", default="0", choices="01", help="whether the tests of Python's faults use the core")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if any(fnmatch.fnmatch(text, given.only) for text in (fault.file, fault.why))]
    if given.list:
        print(*(f"{fault.file}: {fault.why}{'  STALE' * fault.is_stale()}" for fault in chosen), sep="\n")
        return 0
    sys.path.insert(0, str(ROOT))
    from tools import mutate

    @functools.cache
    def run(tests: str, native: str, _fault: Fault | None = None) -> tuple[str, str]:
        words = [f"tests/{word}" if (mutate.TREE / "tests" / word).exists() else word for word in shlex.split(tests)]
        return mutate.run(words, given.limit, native)

    mutate.prepare()
    counted: collections.Counter[str] = collections.Counter()
    for fault in chosen:
        native, text = given.native if fault.file.endswith(".py") else "1", (ROOT / fault.file).read_text()
        if fault.is_stale() or run(fault.tests, native)[0] != "survived":
            state, by = "stale", "" if fault.is_stale() else f"without it: {run(fault.tests, native)}"
        else:
            with mutate.planted(fault.file, text.replace(fault.old, fault.new)) as compiles:
                state, by = run(fault.tests, native, fault) if compiles else ("stale", "it does not compile")
        counted[state] += 1
        print(f"{state:8} {fault.file}: {fault.why}\n         {by}", flush=True)
    print(dict(counted))
    return counted.total() - counted["killed"]


if __name__ == "__main__":
    sys.exit(main())
