"""Parts of an overview, with what a test does not care about filled in."""

from __future__ import annotations

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
