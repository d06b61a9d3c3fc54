"""``rankmesh store``: reads and writes a job's key-value store; values are bytes."""

from __future__ import annotations

import base64
import contextlib
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from rankmesh._cli import json_output, options
from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import (
    NEGATIVE,
    OK,
    TIMED_OUT,
    USAGE,
    CommandError,
    command,
    print_error,
    write,
)
from rankmesh._cli.options import GatewayOption, JsonOption, TokenFileOption, base_url, settings, token
from rankmesh_agent.config.settings import DEFAULT_TIMEOUT, Settings

if TYPE_CHECKING:
    from rankmesh_agent.net.http_client import HttpResponse

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
    """An open store, by way of one of the job's agents.

    Args:
        agent: client of the agent.

    A method raises CommandError if the agent refuses the command, or does not answer.
    """

    def __init__(self, agent: ServiceClient) -> None:
        self._agent = agent

    def get(self, key: str, seconds: float) -> bytes | None:
        """Return the value of a key; None if it has none within some seconds."""

        def attempt(wait: float) -> HttpResponse:
            return self._agent.request("GET", f"{_path(key)}?wait={wait}", wait=wait)

        response = _polled(attempt, seconds, HTTPStatus.NOT_FOUND)
        return None if _is_problem(response, HTTPStatus.NOT_FOUND) else self._checked("GET", key, response).body

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._checked("PUT", key, self._agent.request("PUT", _path(key), content=value))

    def delete(self, key: str) -> bool:
        """Remove a key; return whether it had a value."""
        response = self._agent.request("DELETE", _path(key))
        found = not _is_problem(response, HTTPStatus.NOT_FOUND)
        if found:
            self._checked("DELETE", key, response)
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""
        total: int = self._agent.post("/v1/store/add", {"key": key, "amount": amount})["value"]
        return total

    def wait(self, keys: Sequence[str], seconds: float) -> str:
        """Wait until all of some keys are set; return which are not within some seconds, '' if all are."""

        def attempt(wait: float) -> HttpResponse:
            document = {"keys": list(keys), "timeout": wait}
            return self._agent.request("POST", "/v1/store/wait", document, wait=wait)

        response = _polled(attempt, seconds, HTTPStatus.REQUEST_TIMEOUT)
        if _is_problem(response, HTTPStatus.REQUEST_TIMEOUT):
            return str(response.json()["detail"])
        self._agent.document_of("POST", "/v1/store/wait", response)
        return ""

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, sorted."""
        found: list[str] = self._agent.get(f"/v1/store?prefix={quote(prefix, safe='')}")
        return found

    def _checked(self, method: str, key: str, response: HttpResponse) -> HttpResponse:
        if response.status >= HTTPStatus.BAD_REQUEST:
            self._agent.document_of(method, _path(key), response)
        return response


def _polled(attempt: Callable[[float], HttpResponse], seconds: float, not_yet: HTTPStatus) -> HttpResponse:
    """Repeat a request that waits, given the seconds of each wait, until its time is over or it is answered."""
    from rankmesh_agent.wire.schemas import LONG_POLL_SECONDS

    ends = time.monotonic() + seconds
    while True:
        left = max(0.0, ends - time.monotonic())
        response = attempt(min(LONG_POLL_SECONDS, left))
        if not _is_problem(response, not_yet) or left <= LONG_POLL_SECONDS:
            return response


def _is_problem(response: HttpResponse, status: HTTPStatus) -> bool:
    """Return whether a response is the store's answer that a key is not set."""
    if response.status != status:
        return False
    try:
        return response.json()["code"] in ("key-not-found", "store-timeout")
    except (ValueError, TypeError, KeyError):
        return False


def _path(key: str) -> str:
    # Dots too: clients resolve the path segments '.' and '..', which are valid keys.
    return "/v1/store/" + quote(key, safe="").replace(".", "%2E")


def _check_keys(*keys: str) -> None:
    """Raise CommandError if a key of the command line is invalid."""
    from rankmesh_agent.store.keys import check_key
    from rankmesh_agent.wire.errors import DistStoreError

    try:
        for key in keys:
            check_key(key)
    except DistStoreError as error:
        raise CommandError(error.message, USAGE) from error


@contextlib.contextmanager
def open_store(gateway: str, agent: str, token_file: Any, job: str) -> Iterator[StoreSession]:
    """Open the store that a command line selects.

    Raises:
        CommandError: there is no such job or agent.
    """
    if agent:
        url, secret = base_url(agent), token(token_file)
    else:
        service = options.gateway(gateway, token_file, job)
        with contextlib.closing(service):
            found, url = store_agent(service, job)
            secret = service.credential_for(found)
    with contextlib.closing(ServiceClient("agent", url, secret, _ANSWER_SECONDS)) as client:
        yield StoreSession(client)


def store_agent(gateway: ServiceClient, job: str) -> tuple[str, str]:
    """Return a job, and the URL of an agent of it, all of which serve its store: its first rank's.

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
    url = str(members[0]["http"])
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
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="Seconds to wait for the key to be set.")
    ] = 0.0,
    json: JsonOption = False,
) -> int:
    """Write a key's value to standard output, as it is.

    Exit code 1: the key is not set; 124: it was not set within --timeout.
    """
    _check_keys(key)
    value = keys.get(key, timeout)
    if value is None:
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


@store_command("set", context_settings={"ignore_unknown_options": True})
def set_value(
    keys: StoreSession,
    key: KeyArgument,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The value; - reads standard input to its end.")],
    json: JsonOption = False,
) -> int:
    """Set a key."""
    from rankmesh_agent.store.keys import MAX_VALUE_BYTES

    _check_keys(key)
    # One byte beyond the limit suffices for the refusal.
    content = sys.stdin.buffer.read(MAX_VALUE_BYTES + 1) if value == "-" else value.encode(errors="surrogateescape")
    if len(content) > MAX_VALUE_BYTES:
        raise CommandError(f"the value has more than {MAX_VALUE_BYTES} bytes, the largest that is allowed", USAGE)
    keys.set(key, content)
    if json:
        json_output.write({"key": key, "bytes": len(content)})
    return OK


@store_command(context_settings={"ignore_unknown_options": True})
def add(
    keys: StoreSession,
    key: KeyArgument,
    amount: Annotated[int, typer.Argument(metavar="AMOUNT", help="What to add; may be negative.")] = 1,
    json: JsonOption = False,
) -> int:
    """Add to a number, 0 if there is none; write the sum."""
    _check_keys(key)
    total = keys.add(key, amount)
    if json:
        json_output.write({"key": key, "value": total})
    else:
        write(f"{total}\n")
    return OK


@store_command()
def wait(
    keys: StoreSession,
    names: Annotated[list[str], typer.Argument(metavar="KEY", help="The keys.")],
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.0, help=f"Seconds to wait; else RANKMESH_TIMEOUT, else {DEFAULT_TIMEOUT:g}."
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Wait until all of some keys are set.

    Exit code 124: they were not, within --timeout.
    """
    _check_keys(*names)
    missing = keys.wait(names, settings().timeout if timeout is None else timeout)
    if missing:
        print_error(missing)
        return TIMED_OUT
    if json:
        json_output.write({"keys": names})
    return OK


@store_command("keys")
def list_keys(
    keys: StoreSession,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only keys that begin with this.")] = "",
    json: JsonOption = False,
) -> int:
    """List the keys, one a line, sorted.

    Exit code 0 also when there are none.
    """
    found = keys.keys(prefix)
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
    _check_keys(key)
    found = keys.delete(key)
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
