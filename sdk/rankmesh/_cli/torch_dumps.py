"""Dumps of torch's flight recorder, version 2 of the format.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp for the fields. Collectives are numbered from 1 in each group.
NCCL's entries have a state; gloo's stay ``scheduled``, and are ``retired`` once they have completed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rankmesh._cli.recorded_calls import RecordedCall, RecordedGroup, reports_of
from rankmesh_agent.wire.fields import MAX_WORLD_SIZE
from rankmesh_agent.wire.snapshot import SnapshotCall
from rankmesh_gateway.diagnosis.frames import SourceLocation
from rankmesh_gateway.diagnosis.reports import RankReport

_WORLD = "default_pg"
"""Description of the default group."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/torch/distributed/", "/lib/python", "<frozen ")
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
}


def is_torch_dump(document: object) -> bool:
    """Return whether a document is a dump of torch's flight recorder."""
    return isinstance(document, dict) and "version" in document and ("entries" in document or "pg_config" in document)


def torch_reports(dumps: Mapping[int, tuple[Mapping[str, Any], float]], job: str) -> list[RankReport]:
    """Return the ranks of a job from their dumps, each with the time at which it was written."""
    groups = _groups({rank: dump for rank, (dump, _) in dumps.items()})
    calls = {
        rank: [_call(entry, groups, written) for entry in dump.get("entries", [])]
        for rank, (dump, written) in dumps.items()
    }
    return reports_of(calls, groups, job)


def _groups(dumps: Mapping[int, Mapping[str, Any]]) -> dict[str, RecordedGroup]:
    descriptions: dict[str, str] = {}
    configured: dict[str, list[int]] = {}
    seen: dict[str, set[int]] = {}
    for rank, dump in dumps.items():
        for name, config in dump.get("pg_config", {}).items():
            ranks = config["ranks"]
            found = sorted(int(each) for each in (json.loads(ranks) if isinstance(ranks, str) else ranks))
            if found:  # those of gloo's groups are not recorded
                if not 0 <= found[0] <= found[-1] < MAX_WORLD_SIZE:
                    raise ValueError(f"group {name!r} has the ranks {found}")
                descriptions[name], configured[name] = str(config.get("desc", "")), found
        for entry in dump.get("entries", []):
            name, description = map(str, entry["process_group"])
            descriptions.setdefault(name, description)
            seen.setdefault(name, set()).add(rank)
    return {
        name: RecordedGroup(
            "world" if description == _WORLD else name if description in ("", "undefined") else description,
            configured.get(name) or sorted(range(max(dumps) + 1) if description == _WORLD else seen[name]),
        )
        for name, description in descriptions.items()
    }


def _call(entry: Mapping[str, Any], groups: Mapping[str, RecordedGroup], written: float) -> RecordedCall:
    backend, _, op = str(entry["profiling_name"]).rpartition(":")
    group = str(entry["process_group"][0])
    completed = entry.get("time_discovered_completed_ns") or 0
    ended = entry["state"] == "completed" or bool(completed) or (backend == "gloo" and entry.get("retired") is True)
    age = max(0.0, written - (completed or entry["time_created_ns"]) / 1e9)
    timeout = entry.get("timeout_ms") or 0
    if not ended and timeout > 0:
        age = min(age, timeout / 1e3)  # the file has a later time if it was copied
    place = _place(entry.get("frames", []))
    message = re.fullmatch(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})", op)
    if message is not None:
        peer = groups[group].ranks[int(message[3])]
        return RecordedCall(SnapshotCall(group, 0, message[1], op, age, peer), ended, place)
    arrays = [
        f"{_DTYPES.get(str(dtype).lower(), str(dtype).lower())}[{', '.join(str(int(each)) for each in size)}]"
        for size, dtype in zip(entry.get("input_sizes", []), entry.get("input_dtypes", []), strict=False)
    ]
    more = f", {len(arrays) - 1} more" if len(arrays) > 1 else ""
    call = f"{op}({arrays[0] if arrays else ''}{more})"
    return RecordedCall(SnapshotCall(group, int(entry["collective_seq_id"]), op, call, age), ended, place)


def _place(frames: list[Mapping[str, Any]]) -> SourceLocation | None:
    """Return the innermost line that is no library's; frames are listed from the innermost."""
    for frame in frames:
        file = str(frame["filename"])
        if file.endswith(".py") and not any(part in file for part in _LIBRARIES):
            return SourceLocation(file, int(frame["line"]), str(frame["name"]), "", in_rankmesh=True)
    return None
