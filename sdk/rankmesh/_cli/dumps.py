"""Dumps of flight recorders in a directory, as reports on the ranks of a job that is over."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from rankmesh._cli.exit_codes import CommandError
from rankmesh._cli.recorded_calls import RecordedCall, RecordedGroup, reports_of
from rankmesh._cli.torch_dumps import is_torch_dump, torch_reports
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.fields import MAX_WORLD_SIZE
from rankmesh_agent.wire.schemas import FlightRecord
from rankmesh_agent.wire.snapshot import DUMP_FORMAT, RankDump, SnapshotCall
from rankmesh_gateway import humanize
from rankmesh_gateway.diagnosis.reports import DUMPED, NO_DUMP, RankReport

_MAX_BYTES = 1 << 28
_PICKLE = b"\x80"
_FORMS = (
    "dumps are the files of RANKMESH_DUMP_DIR; those of torch's flight recorder, JSON or pickle; and saved answers of "
    "/v1/flight-recorder; move other files away"
)

T = TypeVar("T")


class DumpFile(NamedTuple):
    """A file with a dump.

    Attributes:
        kind: ``RankMesh``; ``records``: a saved answer of an agent's /v1/flight-recorder; ``torch``.
        written: when it was written, in seconds since 1970.
    """

    path: Path
    kind: str
    document: Any
    written: float


def read_dumps(directory: Path, job: str = "") -> list[RankReport]:
    """Return the ranks of a job, of its newest epoch, from the dumps in a directory; ranks without a dump, too."""
    try:
        paths = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        raise CommandError(f"cannot read {directory}: {error.strerror}") from error
    if not paths:
        raise CommandError(
            f"there is no dump in {directory}: with RANKMESH_DUMP_DIR={directory} each rank writes one there when a "
            "group fails"
        )
    files = [_load(path) for path in paths]
    kind = files[0].kind
    if other := next((file for file in files if file.kind != kind), None):
        raise CommandError(
            f"{directory} has dumps of two kinds, {files[0].path.name} ({kind}) and {other.path.name} ({other.kind}): "
            "give a directory with those of one job"
        )
    if kind == "RankMesh":
        return _rankmesh_reports({file.path: _rank_dump(file) for file in files}, job, directory)
    documents = {file.path: (file.document, file.written) for file in files}
    dumps = _by_rank({path: _rank_in_name(path) for path in documents}, documents, directory)
    try:
        return (torch_reports if kind == "torch" else record_reports)(dumps, job or directory.name)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CommandError(
            f"the dumps in {directory} are damaged ({type(error).__name__}: {error}); {_FORMS}"
        ) from error


def record_reports(answers: Mapping[int, tuple[Any, float]], job: str) -> list[RankReport]:
    """Return the ranks of a job from saved answers of ``/v1/flight-recorder``, each with the time of its writing."""
    records = {rank: json_text.convert(list[FlightRecord], answer) for rank, (answer, _) in answers.items()}
    members: dict[tuple[str, str], list[int]] = {}
    for rank, found in sorted(records.items()):
        for group in dict.fromkeys((each.group, each.name) for each in found):
            members.setdefault(group, []).append(rank)
    groups = {
        id: RecordedGroup(name, range(max(answers) + 1) if name == "world" else ranks)
        for (id, name), ranks in members.items()
    }
    calls = {rank: [_recorded_call(each, answers[rank][1]) for each in found] for rank, found in records.items()}
    return reports_of(calls, groups, job)


def _recorded_call(record: FlightRecord, saved: float) -> RecordedCall:
    age = max(0.0, saved - (record.end or record.begin))
    call = SnapshotCall(record.group, record.seq, record.op, record.call, age, error=record.error)
    message = re.fullmatch(r"(?:send|recv) (?:to|from) (?:any rank|rank (\d{1,9})) \(tag (-?\d+)\)", record.call)
    if message is not None:
        call.seq, call.peer, call.tag = 0, int(message[1] or -1), int(message[2])
    return RecordedCall(call, record.state != "in-flight")


def _rank_dump(file: DumpFile) -> RankDump:
    try:
        dump = json_text.convert(RankDump, file.document)
    except (TypeError, ValueError) as error:
        raise CommandError(
            f"{file.path} is damaged, or from another version of RankMesh ({error}); move it away"
        ) from error
    if not 0 <= dump.rank < dump.world_size <= MAX_WORLD_SIZE:
        raise CommandError(f"{file.path} is damaged: rank {dump.rank} of {dump.world_size}; move it away")
    return dump


def _rankmesh_reports(dumps: Mapping[Path, RankDump], job: str, directory: Path) -> list[RankReport]:
    jobs = sorted({dump.job for dump in dumps.values()})
    if job and job not in jobs:
        raise CommandError(f"{directory} has no dump of job {job!r}, but of {', '.join(jobs)}")
    if len(jobs) > 1 and not job:
        raise CommandError(f"{directory} has dumps of several jobs, {', '.join(jobs)}: give --job NAME")
    job = job or jobs[0]
    newest = max(dump.epoch for dump in dumps.values() if dump.job == job)
    ranks = {path: dump.rank for path, dump in dumps.items() if (dump.job, dump.epoch) == (job, newest)}
    found = _by_rank(ranks, dumps, directory)
    size = max(dump.world_size for dump in found.values())
    return [_report(found, rank, job, newest) for rank in range(size)]


def _report(dumps: Mapping[int, RankDump], rank: int, job: str, epoch: int) -> RankReport:
    dump = dumps.get(rank)
    if dump is not None:
        return RankReport(job, epoch, rank, dump.host, dump.pid, "", DUMPED, reason=dump.failure, snapshot=asdict(dump))
    blamed = [other for other, each in dumps.items() if rank in each.failed_ranks]
    error = f"rank {blamed[0]} reports: {dumps[blamed[0]].failure}" if blamed else ""
    return RankReport(job, epoch, rank, "", 0, "", NO_DUMP, error=error)


def _load(path: Path) -> DumpFile:
    """Return a file's content."""

    def refusal(reason: str) -> CommandError:
        return CommandError(f"{path} is no dump of a flight recorder: {reason}; {_FORMS}")

    try:
        status = path.stat()
        if status.st_size > _MAX_BYTES:
            raise refusal(f"it has more than {humanize.size(_MAX_BYTES)}")
        content = path.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
    try:
        document = unpickle(content) if content.startswith(_PICKLE) else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refusal(str(error) or type(error).__name__) from error
    if isinstance(document, dict) and document.get("format") == DUMP_FORMAT:
        return DumpFile(path, "RankMesh", document, status.st_mtime)
    if is_torch_dump(document):
        return DumpFile(path, "torch", document, status.st_mtime)
    if isinstance(document, list) and all(isinstance(each, dict) and "seq" in each for each in document):
        return DumpFile(path, "records", document, status.st_mtime)
    raise refusal("it has other content")


class _PlainUnpickler(pickle._Unpickler):
    """Unpickler of plain containers, numbers and strings. In Python: the one in C allocates what a pickle asks for."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse whatever a pickle wants to call."""
        raise pickle.UnpicklingError(f"it is a pickle that calls {module}.{name}, which a dump does not")


def unpickle(content: bytes) -> Any:
    """Return the plain containers that a pickle has."""
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(f"it is a damaged pickle ({type(error).__name__})") from error


def _rank_in_name(path: Path) -> int:
    """Return the rank in a file's name: the last number, suffixes left out."""
    stem = re.sub(r"(\.(json|pickle|pkl|pt|bin|txt|trace))+$", "", path.name)
    found = re.findall(r"rank[_-]?(\d+)", stem) or re.findall(r"\d+", stem)
    if not found or int(found[-1]) >= MAX_WORLD_SIZE:
        raise CommandError(f"{path} has no rank in its name: name the dumps rank_0, rank_1, ...")
    return int(found[-1])


def _by_rank(ranks: Mapping[Path, int], dumps: Mapping[Path, T], directory: Path) -> dict[int, T]:
    """Return the dumps of files by rank."""
    found: dict[int, Path] = {}
    for path, rank in ranks.items():
        if (other := found.setdefault(rank, path)) is not path:
            raise CommandError(
                f"{directory} has two dumps of rank {rank}, {other.name} and {path.name}: give a directory with the "
                "dumps of one job"
            )
    return {rank: dumps[path] for rank, path in sorted(found.items())}
