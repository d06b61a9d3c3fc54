"""Parts of an overview, with what a test does not care about filled in."""

from __future__ import annotations

import time
from typing import Any


def rank(number: int, state: str = "alive", *, job: str = "job", host: str = "host-0", **more: Any) -> dict[str, Any]:
    """A rank, as ``GET /v1/ranks`` has it."""
    member = {
        "rank": number,
        "instance": f"{job}-{number}",
        "host": host,
        "host_id": host,
        "pid": 4000 + number,
        "addresses": [f"127.0.0.1:{9000 + number}"],
        "http": f"http://127.0.0.1:{8000 + number}",
    }
    return {"job": job, "epoch": 1, "state": state, "heartbeat_age": 0.4, "reason": "", "member": member, **more}


def usage(cpu: float = 0.95, **more: Any) -> dict[str, Any]:
    """What a process has used in a second."""
    return {"cpu": cpu, "core_wait": 0.0, "faults": 0.0, "memory": 180_000_000, "state": "R", **more}


def job(state: str = "running", ranks: int = 4, **more: Any) -> dict[str, Any]:
    """A job, as ``GET /v1/jobs`` has it, that began three minutes ago."""
    base = {"job": "job", "epoch": 1, "state": state, "world_size": ranks, "ranks": {"alive": ranks}}
    return {**base, "since": time.time() - 185, "ended": None, **more}


def finding(text: str, *, job: str = "job", **more: Any) -> dict[str, Any]:
    """A finding on rank 2, for which the others wait."""
    return {
        "kind": "elsewhere",
        "job": job,
        "ranks": [2],
        "text": text,
        "remedy": "look at that line",
        "seconds": 12.0,
        "call": "all_reduce #3",
        "waiting": [0, 1, 3],
        "last": "all_reduce(float32[1000], SUM) #2, 12.0 s ago",
        "places": {},
        "young": False,
        "name": "",
        "severity": "warning",
        **more,
    }


def failure(text: str, **more: Any) -> dict[str, Any]:
    """A failure, of a moment ago."""
    return finding(text, **{"kind": "failed", "severity": "failed", "seconds": 4.0, "last": "", **more})


def snapshot(number: int, *, answers: bool = True, **more: Any) -> dict[str, Any]:
    """A rank in a call, as ``GET /v1/ranks/{rank}/snapshot`` has it."""
    call = {"group": "aa", "seq": 3, "op": "all_reduce", "call": "all_reduce(float32[1000], SUM)", "age": 12.0}
    call |= {"peer": None, "tag": 0, "awaited": True, "error": ""}

    def frame(line: int, function: str, origin: str, file: str = "/home/me/train.py") -> dict[str, Any]:
        return {"file": file, "line": line, "function": function, "code": f"line {line}", "origin": origin}

    inner = [frame(76, "all_reduce", "rankmesh", "reduce.py"), frame(84, "futex_wait", "rankmesh", "futex.py")]
    main = [frame(14, "<module>", "user"), frame(8, "step", "user"), *inner]
    found = {
        "job": "job",
        "epoch": 1,
        "rank": number,
        "attached": False,
        "groups": [{"id": "aa", "name": "world", "ranks": [0, 1, 2, 3], "seq": 3}],
        "calls": [call],
        "ended": [call | {"seq": 1, "age": 14.0, "error": "ValueError: of old"}, call | {"seq": 2}],
        "store_waits": [{"op": "get", "keys": ["batch"], "age": 5.0, "seconds": 300.0}],
        "stacks": [
            {"name": "MainThread", "ident": 1, "native_id": 4000 + number, "daemon": False, "frames": main},
            {"name": "rankmesh-heartbeat", "ident": 2, "native_id": 9, "daemon": True, "frames": inner},
        ],
    }
    place = {"job": "job", "epoch": 1, "rank": number, "host": "host-0", "pid": 4000 + number, "state": "alive"}
    return {
        **place,
        "answers": answers,
        "error": "" if answers else "no answer within 1 s",
        "process": "" if answers else "T",
        "place": "train.py:8 in step" if answers else "",
        "snapshot": {**found, **more} if answers else None,
    }


def group(name: str = "world", ranks: int = 4, *, job: str = "job", **more: Any) -> dict[str, Any]:
    """A group whose members have begun a hundred operations and one each more than the member before."""
    return {
        "job": job,
        "epoch": 1,
        "id": name.encode().hex()[:16].ljust(16, "0"),
        "name": name,
        "ranks": list(range(ranks)),
        "medium": "shm",
        "seqs": {str(each): 100 + each for each in range(ranks)},
        "failure": "",
        "operations_rate": 12.0,
        "bytes_rate": 3.0e6,
        **more,
    }


def inflight(age: float = 12.0, *, arrived: list[int], missing: list[int], **more: Any) -> dict[str, Any]:
    """An operation under way."""
    return {
        "job": "job",
        "epoch": 1,
        "group": "776f726c64000000",
        "name": "world",
        "op": "all_reduce(sum, float32 x 1024)",
        "seq": 103,
        "age": age,
        "bytes": 4096,
        "arrived": arrived,
        "missing": missing,
        "differing": {},
        **more,
    }


def agent(name: str, state: str = "free", **more: Any) -> dict[str, Any]:
    """A standalone agent; a leased one has a lease for its rank of a job."""
    leases = [
        {"id": f"l-{name}", "job": "job", "rank": 0, "world_size": 2, "holder": "python train.py (laptop, pid 77)"}
    ]
    beat = {
        "id": f"id-{name}",
        "name": name,
        "host": f"{name}.local",
        "host_id": name,
        "pid": 1,
        "urls": ["http://127.0.0.1:8701"],
        "leases": leases if state == "leased" else [],
    }
    return {"state": state, "heartbeat_age": 0.2, "agent": beat, **more}
