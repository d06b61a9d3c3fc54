"""Dumps of flight recorders in a directory, as reports on the ranks of a job that is over."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rankmesh._cli.exit_codes import CommandError
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.fields import MAX_WORLD_SIZE
from rankmesh_agent.wire.snapshot import DUMP_FORMAT, RankDump
from rankmesh_gateway import humanize
from rankmesh_gateway.diagnosis.reports import DUMPED, NO_DUMP, RankReport

_MAX_BYTES = 1 << 28


def read_dumps(directory: Path, job: str = "") -> list[RankReport]:
    """Return the ranks of a job, of its newest epoch, from the dumps in a directory; ranks without a dump, too.

    Args:
        directory: the directory; its subdirectories and hidden files are left out.
        job: the job, if there are dumps of several.

    Raises:
        CommandError: there are no dumps, a file is none, or they are of several jobs.
    """
    try:
        paths = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        raise CommandError(f"cannot read {directory}: {error.strerror}") from error
    if not paths:
        raise CommandError(
            f"there is no dump in {directory}: with RANKMESH_DUMP_DIR={directory} each rank writes one there when a "
            "group fails"
        )
    dumps = {path: _load(path) for path in paths}
    jobs = sorted({dump.job for dump in dumps.values()})
    if job and job not in jobs:
        raise CommandError(f"{directory} has no dump of job {job!r}, but of {', '.join(jobs)}")
    if len(jobs) > 1 and not job:
        raise CommandError(f"{directory} has dumps of several jobs, {', '.join(jobs)}: give --job NAME")
    job = job or jobs[0]
    newest = max(dump.epoch for dump in dumps.values() if dump.job == job)
    by_rank: dict[int, Path] = {}
    for path, dump in dumps.items():
        if (dump.job, dump.epoch) == (job, newest) and (other := by_rank.setdefault(dump.rank, path)) != path:
            raise CommandError(
                f"{directory} has two dumps of rank {dump.rank}, {other.name} and {path.name}: give a directory with "
                "the dumps of one job"
            )
    found = {rank: dumps[path] for rank, path in sorted(by_rank.items())}
    return [_report(found, rank, job, newest) for rank in range(max(dump.world_size for dump in found.values()))]


def _report(dumps: dict[int, RankDump], rank: int, job: str, epoch: int) -> RankReport:
    dump = dumps.get(rank)
    if dump is not None:
        return RankReport(job, epoch, rank, dump.host, dump.pid, "", DUMPED, reason=dump.failure, snapshot=asdict(dump))
    blamed = [other for other, each in dumps.items() if rank in each.failed_ranks]
    error = f"rank {blamed[0]} reports: {dumps[blamed[0]].failure}" if blamed else ""
    return RankReport(job, epoch, rank, "", 0, "", NO_DUMP, error=error)


def _load(path: Path) -> RankDump:
    """Return the dump in a file.

    Raises:
        CommandError: it is no dump.
    """
    reason, document = f"it has more than {humanize.size(_MAX_BYTES)}", None
    try:
        if path.stat().st_size <= _MAX_BYTES:
            document, reason = json.loads(path.read_bytes()), "it has other content"
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = str(error)
    if not isinstance(document, dict) or document.get("format") != DUMP_FORMAT:
        raise CommandError(
            f"{path} is no dump of a flight recorder: {reason}; dumps are the files of RANKMESH_DUMP_DIR; move other "
            "files away"
        )
    try:
        dump = json_text.convert(RankDump, document)
    except (TypeError, ValueError) as error:
        raise CommandError(f"{path} is damaged, or from another version of RankMesh ({error}); move it away") from error
    if not 0 <= dump.rank < dump.world_size <= MAX_WORLD_SIZE:
        raise CommandError(f"{path} is damaged: rank {dump.rank} of {dump.world_size}; move it away")
    return dump
