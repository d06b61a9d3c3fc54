"""``rankmesh store``: a job's key-value store, as bytes in and out."""

from __future__ import annotations

import base64
import contextlib
import sys
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rankmesh._cli import json_output, options
from rankmesh._cli.client import Service
from rankmesh._cli.exit_codes import (
    DONE,
    FAILED,
    NO,
    NOBODY,
    REFUSED,
    TIMED_OUT,
    USAGE,
    CommandError,
    complain,
    reporting,
    write,
)
from rankmesh._cli.options import GatewayOption, JsonOption, TokenFileOption, base_url, settings, token
from rankmesh_agent.config.settings import DEFAULT_TIMEOUT, Settings

if TYPE_CHECKING:
    from rankmesh_agent.store.command import Command
    from rankmesh_agent.store.http_client import BlockingHttpStore

T = TypeVar("T")

_TRY_SECONDS = 2.0
_ANSWER_SECONDS = 30.0
"""A rank that is busy and has to load its web framework first may take that long to answer."""

app = typer.Typer(
    name="store",
    help="Read and write a job's key-value store, through any of its agents. Values are bytes, as they are.",
    no_args_is_help=True,
)

AgentOption = Annotated[
    str,
    typer.Option("--agent", metavar="URL", help="An agent of the job; else the gateway says where one is."),
]
JobOption = Annotated[
    str, typer.Option("--job", metavar="NAME", help="The job, where the gateway has several; else RANKMESH_JOB.")
]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key.")]


class Keys:
    """A store that is open, and what most of its commands were given.

    Args:
        store: asks the agent.
        url: the agent's.
    """

    def __init__(self, store: BlockingHttpStore, url: str) -> None:
        self._store = store
        self._url = url

    def execute(self, command: Command[T]) -> T:
        """Carry out a command.

        Raises:
            CommandError: the agent refuses, or does not answer.
            KeyNotFoundError, StoreTimeoutError: it says so.
        """
        from rankmesh_agent.wire.errors import DistNetworkError, DistStoreError, KeyNotFoundError, StoreTimeoutError

        try:
            return self._store.execute_within(command, _ANSWER_SECONDS)
        except (KeyNotFoundError, StoreTimeoutError):
            raise
        except DistNetworkError as error:
            if f"answered {HTTPStatus.UNAUTHORIZED:d}" in error.message:
                raise CommandError(
                    f"the agent at {self._url} wants the job's token; set RANKMESH_TOKEN to it, or give --token-file",
                    REFUSED,
                ) from error
            code = NOBODY if "cannot be reached" in error.message else FAILED
            raise CommandError(f"{error.message}; 'rankmesh status' shows who is alive", code) from error
        except DistStoreError as error:
            raise CommandError(error.message) from error


@contextlib.contextmanager
def opened(gateway: str, agent: str, token_file: Any, job: str) -> Iterator[Keys]:
    """The store that a command line is about.

    Raises:
        CommandError: it cannot be found.
    """
    from rankmesh_agent.store.http_client import BlockingHttpStore

    if agent:
        url, secret = base_url(agent), token(token_file)
    else:
        service = options.gateway(gateway, token_file)
        with contextlib.closing(service):
            url, secret = owner(service, job), service.token
    store = BlockingHttpStore(url, secret)
    try:
        yield Keys(store, url)
    finally:
        store.close()


def owner(gateway: Service, job: str) -> str:
    """Return the URL of the agent that has a job's keys: its rank 0's.

    Args:
        gateway: whom to ask.
        job: the job's name; empty for the environment's, or the only one.

    Raises:
        CommandError: there is no such job, or there are several.
    """
    asked = job or settings().job
    running = [each for each in gateway.get("/v1/ranks") if each["state"] in ("alive", "suspect")]
    jobs = sorted({each["job"] for each in running})
    if asked not in jobs and (job or asked != Settings.job or len(jobs) != 1):
        there = f"there are: {', '.join(jobs)}" if jobs else "no rank is alive"
        if not job and asked == Settings.job and jobs:
            raise CommandError(f"the gateway at {gateway.url} has several jobs; give --job, {there}", USAGE)
        raise CommandError(f"the gateway at {gateway.url} has no running job {asked!r}; {there}", NO)
    if asked not in jobs:
        asked = jobs[0]
    ranks = [each for each in running if each["job"] == asked]
    newest = max(each["epoch"] for each in ranks)
    members = sorted((each["member"] for each in ranks if each["epoch"] == newest), key=lambda each: each["rank"])
    url = str(members[0]["http"])  # rank 0's while it is alive; what another is asked, it passes on
    carriers = [each["agent"]["urls"] for each in gateway.get("/v1/agents") if url in each["agent"]["urls"]]
    return _first_that_answers(list(dict.fromkeys([url, *carriers[0]]))) if carriers else url


def _first_that_answers(urls: list[str]) -> str:
    """Return the first URL of an agent that leads there from here; the first of all if none does.

    A standalone agent may have addresses that only its peers reach, and a port that is published for others.
    """
    from rankmesh_agent.net.http_client import HttpClient, NoResponseError

    for url in urls if len(urls) > 1 else ():
        asker = HttpClient()
        try:
            asker.request("GET", f"{url}/livez", timeout=_TRY_SECONDS)
        except (NoResponseError, ValueError):
            continue
        finally:
            asker.close()
        return url
    return urls[0]


@app.command()
@reporting
def get(
    key: KeyArgument,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the key to be set.")] = 0.0,
    gateway: GatewayOption = "",
    agent: AgentOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    json: JsonOption = False,
) -> int:
    """Write a key's value to standard output, as it is.

    Exit code 1: nobody has set the key; 124: nor did anybody within --timeout.
    """
    from rankmesh_agent.store.commands import Get
    from rankmesh_agent.wire.errors import KeyNotFoundError

    with opened(gateway, agent, token_file, job) as keys:
        try:
            value = keys.execute(checked(Get, key, timeout))
        except KeyNotFoundError:
            complain(f"nobody has set key {key!r}" + (f" within {timeout:g} s" if timeout else "; --timeout waits"))
            return TIMED_OUT if timeout else NO
    if json:
        json_output.write(
            {"key": key, "bytes": len(value), "text": _text(value), "base64": base64.b64encode(value).decode()}
        )
    else:
        write(value)
        if sys.stdout.isatty() and not value.endswith(b"\n"):
            write("\n")  # or the prompt would follow on the same line
    return DONE


@app.command("set")
@reporting
def set_value(
    key: KeyArgument,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The value; - reads standard input to its end.")],
    gateway: GatewayOption = "",
    agent: AgentOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    json: JsonOption = False,
) -> int:
    """Set a key."""
    from rankmesh_agent.store.commands import Set
    from rankmesh_agent.store.keys import MAX_VALUE_BYTES

    # One byte too many is enough to be refused.
    content = sys.stdin.buffer.read(MAX_VALUE_BYTES + 1) if value == "-" else value.encode(errors="surrogateescape")
    with opened(gateway, agent, token_file, job) as keys:
        keys.execute(checked(Set, key, content))
    if json:
        json_output.write({"key": key, "bytes": len(content)})
    return DONE


@app.command(context_settings={"ignore_unknown_options": True})
@reporting
def add(
    key: KeyArgument,
    amount: Annotated[int, typer.Argument(metavar="[AMOUNT]", help="What to add; may be negative.")] = 1,
    gateway: GatewayOption = "",
    agent: AgentOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    json: JsonOption = False,
) -> int:
    """Add to the number under a key, 0 if there is none, and write the sum."""
    from rankmesh_agent.store.commands import Add

    with opened(gateway, agent, token_file, job) as keys:
        total = keys.execute(checked(Add, key, amount))
    if json:
        json_output.write({"key": key, "value": total})
    else:
        write(f"{total}\n")
    return DONE


@app.command()
@reporting
def wait(
    names: Annotated[list[str], typer.Argument(metavar="KEY...", help="The keys.")],
    timeout: Annotated[
        float | None, typer.Option(min=0.0, help=f"Seconds to wait; else RANKMESH_TIMEOUT, else {DEFAULT_TIMEOUT:g}.")
    ] = None,
    gateway: GatewayOption = "",
    agent: AgentOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    json: JsonOption = False,
) -> int:
    """Wait until all of some keys are set.

    Exit code 124: they were not, within --timeout.
    """
    from rankmesh_agent.store.commands import Wait
    from rankmesh_agent.wire.errors import StoreTimeoutError

    limit = settings().timeout if timeout is None else timeout
    with opened(gateway, agent, token_file, job) as keys:
        try:
            keys.execute(checked(Wait, tuple(names), limit))
        except StoreTimeoutError as error:
            complain(error.message)
            return TIMED_OUT
    if json:
        json_output.write({"keys": names})
    return DONE


@app.command("keys")
@reporting
def list_keys(
    prefix: Annotated[str, typer.Argument(metavar="[PREFIX]", help="Only keys that begin with this.")] = "",
    gateway: GatewayOption = "",
    agent: AgentOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    json: JsonOption = False,
) -> int:
    """List the keys, one a line, sorted.

    Exit code 0 also when there are none.
    """
    from rankmesh_agent.store.commands import Keys as ListKeys

    with opened(gateway, agent, token_file, job) as keys:
        found = keys.execute(checked(ListKeys, prefix))
    if json:
        json_output.write(found)
    else:
        write("".join(f"{_line(each)}\n" for each in found))
    return DONE


@app.command()
@reporting
def delete(
    key: KeyArgument,
    gateway: GatewayOption = "",
    agent: AgentOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    json: JsonOption = False,
) -> int:
    """Remove a key.

    Exit code 1: there was none.
    """
    from rankmesh_agent.store.commands import Delete

    with opened(gateway, agent, token_file, job) as keys:
        found = keys.execute(checked(Delete, key))
    if json:
        json_output.write({"key": key, "deleted": found})
    elif not found:
        complain(f"nobody has set key {key!r}")
    return DONE if found else NO


def checked(kind: type[Command[T]], *arguments: Any) -> Command[T]:
    """Return a command to the store.

    Raises:
        CommandError: its key or value cannot be one.
    """
    from rankmesh_agent.wire.errors import DistStoreError

    try:
        return kind(*arguments)
    except DistStoreError as error:
        raise CommandError(error.message, USAGE) from error


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _line(key: str) -> str:
    """Return a key so that it takes one line: as it is, or with escapes if it has line breaks and the like."""
    return key if key.isprintable() else key.encode("unicode_escape").decode("ascii")
