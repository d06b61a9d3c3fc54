"""``rankmesh store``: reads and writes a job's key-value store; values are bytes."""

from __future__ import annotations

import base64
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rankmesh._cli import json_output, options
from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import (
    FAILED,
    NEGATIVE,
    OK,
    TIMED_OUT,
    UNAUTHORIZED,
    UNREACHABLE,
    USAGE,
    CommandError,
    command,
    print_error,
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
"""Timeout of an agent's response: a busy rank may have to load its web framework first."""

app = typer.Typer(
    name="store",
    help="Read and write a job's key-value store, through any of its agents. Values are bytes, as they are.",
    no_args_is_help=True,
)

AgentOption = Annotated[
    str, typer.Option("--agent", metavar="URL", help="An agent of the job; else one that the gateway lists.")
]
JobOption = Annotated[
    str, typer.Option("--job", metavar="NAME", help="The job, where the gateway has several; else RANKMESH_JOB.")
]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key.")]


class StoreSession:
    """An open store.

    Args:
        store: client of the agent.
        url: the agent's URL.
    """

    def __init__(self, store: BlockingHttpStore, url: str) -> None:
        self._store = store
        self._url = url

    def execute(self, kind: type[Command[T]], *arguments: Any) -> T:
        """Execute a store command of a kind with these arguments.

        Raises:
            CommandError: the key or value is invalid, the agent refuses the command, or it does not answer.
            KeyNotFoundError, StoreTimeoutError: the store's.
        """
        from rankmesh_agent.wire.errors import DistNetworkError, DistStoreError, KeyNotFoundError, StoreTimeoutError

        try:
            command = kind(*arguments)
        except DistStoreError as error:
            raise CommandError(error.message, USAGE) from error
        try:
            return self._store.execute(command, _ANSWER_SECONDS)
        except (KeyNotFoundError, StoreTimeoutError):
            raise
        except DistNetworkError as error:
            if f"answered {HTTPStatus.UNAUTHORIZED:d}" in error.message:
                raise CommandError(
                    f"the agent at {self._url} wants the job's token; set RANKMESH_TOKEN to it, or give --token-file",
                    UNAUTHORIZED,
                ) from error
            code = UNREACHABLE if "cannot be reached" in error.message else FAILED
            raise CommandError(f"{error.message}; 'rankmesh status' shows which ranks are alive", code) from error
        except DistStoreError as error:
            raise CommandError(error.message) from error


@contextlib.contextmanager
def open_store(gateway: str, agent: str, token_file: Any, job: str) -> Iterator[StoreSession]:
    """Open the store that a command line selects.

    Raises:
        CommandError: there is no such job or agent.
    """
    from rankmesh_agent.store.http_client import BlockingHttpStore

    if agent:
        url, secret = base_url(agent), token(token_file)
    else:
        service = options.gateway(gateway, token_file, job)
        with contextlib.closing(service):
            found, url = store_owner(service, job)
            secret = service.credential_for(found)
    with contextlib.closing(BlockingHttpStore(url, secret)) as store:
        yield StoreSession(store, url)


def store_owner(gateway: ServiceClient, job: str) -> tuple[str, str]:
    """Return a job, and the URL of the agent that owns its store: its rank 0's.

    Args:
        gateway: client of the gateway.
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
        raise CommandError(f"the gateway at {gateway.url} has no running job {asked!r}; {there}", NEGATIVE)
    if asked not in jobs:
        asked = jobs[0]
    ranks = [each for each in running if each["job"] == asked]
    newest = max(each["epoch"] for each in ranks)
    members = sorted((each["member"] for each in ranks if each["epoch"] == newest), key=lambda each: each["rank"])
    url = str(members[0]["http"])  # rank 0's while it is alive; other agents forward
    carriers = [each["agent"]["urls"] for each in gateway.get("/v1/agents") if url in each["agent"]["urls"]]
    return asked, _first_reachable(list(dict.fromkeys([url, *carriers[0]]))) if carriers else url


def _first_reachable(urls: list[str]) -> str:
    """Return the first URL of an agent that is reachable from here, else the first.

    A standalone agent may have addresses that only its peers reach, and a published port for other hosts.
    """
    from rankmesh_agent.net.http_client import HttpClient, NoResponseError

    for url in urls if len(urls) > 1 else ():
        with contextlib.closing(HttpClient()) as client, contextlib.suppress(NoResponseError, ValueError):
            client.request("GET", f"{url}/livez", timeout=_TRY_SECONDS)
            return url
    return urls[0]


def store_command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., int]], None]:
    """Register a command of ``rankmesh store``: adds the options that select a store, and passes the open store.

    Args:
        name: the command's name; the function's by default.
        settings: arguments of ``Typer.command``.
    """

    def register(function: Callable[..., int]) -> None:
        signature = inspect.signature(function, eval_str=True)
        _, *own = signature.parameters.values()

        def run(**values: Any) -> int:
            with open_store(*(values.pop(each.name) for each in _COMMON)) as keys:
                return function(keys, **values)

        run.__doc__, run.__name__ = function.__doc__, function.__name__
        run.__signature__ = signature.replace(parameters=[*own, *_COMMON])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in (*own, *_COMMON)}
        app.command(name, **settings)(command(run))

    return register


def _option(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


_COMMON = (
    _option("gateway", GatewayOption, ""),
    _option("agent", AgentOption, ""),
    _option("token_file", TokenFileOption, None),
    _option("job", JobOption, ""),
)


@store_command()
def get(
    keys: StoreSession,
    key: KeyArgument,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the key to be set.")] = 0.0,
    json: JsonOption = False,
) -> int:
    """Write a key's value to standard output, as it is.

    Exit code 1: the key is not set; 124: it was not set within --timeout.
    """
    from rankmesh_agent.store.commands import Get
    from rankmesh_agent.wire.errors import KeyNotFoundError

    try:
        value = keys.execute(Get, key, timeout)
    except KeyNotFoundError:
        print_error(f"key {key!r} is not set" + (f" after {timeout:g} s" if timeout else "; --timeout waits"))
        return TIMED_OUT if timeout else NEGATIVE
    if json:
        json_output.write(
            {"key": key, "bytes": len(value), "text": _text(value), "base64": base64.b64encode(value).decode()}
        )
    else:
        write(value)
        if sys.stdout.isatty() and not value.endswith(b"\n"):
            write("\n")  # the prompt starts on a line of its own
    return OK


@store_command("set")
def set_value(
    keys: StoreSession,
    key: KeyArgument,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The value; - reads standard input to its end.")],
    json: JsonOption = False,
) -> int:
    """Set a key."""
    from rankmesh_agent.store.commands import Set
    from rankmesh_agent.store.keys import MAX_VALUE_BYTES

    # One byte beyond the limit suffices for the refusal.
    content = sys.stdin.buffer.read(MAX_VALUE_BYTES + 1) if value == "-" else value.encode(errors="surrogateescape")
    keys.execute(Set, key, content)
    if json:
        json_output.write({"key": key, "bytes": len(content)})
    return OK


@store_command(context_settings={"ignore_unknown_options": True})
def add(
    keys: StoreSession,
    key: KeyArgument,
    amount: Annotated[int, typer.Argument(metavar="[AMOUNT]", help="What to add; may be negative.")] = 1,
    json: JsonOption = False,
) -> int:
    """Add to the number under a key, 0 if there is none, and write the sum."""
    from rankmesh_agent.store.commands import Add

    total = keys.execute(Add, key, amount)
    if json:
        json_output.write({"key": key, "value": total})
    else:
        write(f"{total}\n")
    return OK


@store_command()
def wait(
    keys: StoreSession,
    names: Annotated[list[str], typer.Argument(metavar="KEY...", help="The keys.")],
    timeout: Annotated[
        float | None, typer.Option(min=0.0, help=f"Seconds to wait; else RANKMESH_TIMEOUT, else {DEFAULT_TIMEOUT:g}.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Wait until all of some keys are set.

    Exit code 124: they were not, within --timeout.
    """
    from rankmesh_agent.store.commands import Wait
    from rankmesh_agent.wire.errors import StoreTimeoutError

    limit = settings().timeout if timeout is None else timeout
    try:
        keys.execute(Wait, tuple(names), limit)
    except StoreTimeoutError as error:
        print_error(error.message)
        return TIMED_OUT
    if json:
        json_output.write({"keys": names})
    return OK


@store_command("keys")
def list_keys(
    keys: StoreSession,
    prefix: Annotated[str, typer.Argument(metavar="[PREFIX]", help="Only keys that begin with this.")] = "",
    json: JsonOption = False,
) -> int:
    """List the keys, one a line, sorted.

    Exit code 0 also when there are none.
    """
    from rankmesh_agent.store.commands import Keys as ListKeys

    found = keys.execute(ListKeys, prefix)
    if json:
        json_output.write(found)
    else:
        lines = (key if key.isprintable() else key.encode("unicode_escape").decode("ascii") for key in found)
        write("".join(f"{line}\n" for line in lines))
    return OK


@store_command()
def delete(keys: StoreSession, key: KeyArgument, json: JsonOption = False) -> int:
    """Remove a key.

    Exit code 1: there was none.
    """
    from rankmesh_agent.store.commands import Delete

    found = keys.execute(Delete, key)
    if json:
        json_output.write({"key": key, "deleted": found})
    elif not found:
        print_error(f"key {key!r} is not set")
    return OK if found else NEGATIVE


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None
