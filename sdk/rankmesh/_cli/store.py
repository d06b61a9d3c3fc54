"""``rankmesh store``: reads and writes a job's key-value store; values are bytes."""

from __future__ import annotations

import base64
import contextlib
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from rankmesh._cli import options
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
    write_json,
)
from rankmesh._cli.options import GatewayOption, JsonOption, TokenFileOption, base_url, settings, token
from rankmesh_agent.config.settings import DEFAULT_TIMEOUT, Settings

if TYPE_CHECKING:
    from rankmesh_agent.net.http_client import HttpResponse

_TRY_SECONDS = 2.0
_ANSWER_SECONDS = 30.0
"""Timeout of an agent's response: a busy rank may have to load its web framework first."""

app = typer.Typer(name="store", help="Read and write a job's key-value store. Values are bytes.", no_args_is_help=True)

AgentOption = Annotated[
    str, typer.Option("--agent", metavar="URL", help="An agent of the job; by default one that the gateway lists.")
]
JobOption = Annotated[
    str, typer.Option("--job", metavar="NAME", help="The job, where the gateway has several; by default RANKMESH_JOB.")
]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key.")]


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
def _agent_of(gateway: str, agent: str, token_file: Any, job: str) -> Iterator[ServiceClient]:
    """Yield a client of the agent that a command line selects."""
    if agent:
        url, secret = base_url(agent), token(token_file)
    else:
        service = options.gateway(gateway, token_file, job)
        with contextlib.closing(service):
            found, url = _find_agent(service, job)
            secret = service.credential_for(found)
    with contextlib.closing(ServiceClient("agent", url, secret, _ANSWER_SECONDS)) as client:
        yield client


def _find_agent(gateway: ServiceClient, job: str) -> tuple[str, str]:
    """Return a job, and the URL of an agent of it, all of which serve its store: its first rank's."""
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
    """Return the first URL of an agent that is reachable from here, else the first: some may be for its peers alone."""
    from rankmesh_agent.net.http_client import HttpClient, NoResponseError

    for url in urls if len(urls) > 1 else ():
        with contextlib.closing(HttpClient()) as client, contextlib.suppress(NoResponseError, ValueError):
            client.request("GET", f"{url}/livez", timeout=_TRY_SECONDS)
            return url
    return urls[0]


def store_command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., int]], None]:
    """Register a command of ``rankmesh store``: adds the options that select a store, passes a client."""

    def register(function: Callable[..., int]) -> None:
        signature = inspect.signature(function, eval_str=True)
        _, *own = signature.parameters.values()

        def run(**values: Any) -> int:
            with _agent_of(*(values.pop(each.name) for each in _COMMON)) as agent:
                return function(agent, **values)

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
    agent: ServiceClient,
    key: KeyArgument,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How long to wait for the key to be set.")
    ] = 0.0,
    json: JsonOption = False,
) -> int:
    """Write the value of a key to standard output.

    Exit code 1: the key is not set; 124: it was not set within --timeout.
    """
    _check_keys(key)
    response = _polled(
        lambda wait: agent.request("GET", f"{_path(key)}?wait={wait}", wait=wait), timeout, HTTPStatus.NOT_FOUND
    )
    if _is_problem(response, HTTPStatus.NOT_FOUND):
        print_error(f"key {key!r} is not set" + (f" after {timeout:g} s" if timeout else "; --timeout waits"))
        return TIMED_OUT if timeout else NEGATIVE
    value = agent.checked("GET", _path(key), response).body
    if json:
        write_json({"key": key, "bytes": len(value), "text": _text(value), "base64": base64.b64encode(value).decode()})
    else:
        write(value)
        if sys.stdout.isatty() and not value.endswith(b"\n"):
            write("\n")  # the prompt starts on a line of its own
    return OK


@store_command("set", context_settings={"ignore_unknown_options": True})
def set_value(
    agent: ServiceClient,
    key: KeyArgument,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The value; - reads it from standard input.")],
    json: JsonOption = False,
) -> int:
    """Set a key."""
    from rankmesh_agent.store.keys import MAX_VALUE_BYTES

    _check_keys(key)
    # One byte beyond the limit suffices for the refusal.
    content = sys.stdin.buffer.read(MAX_VALUE_BYTES + 1) if value == "-" else value.encode(errors="surrogateescape")
    if len(content) > MAX_VALUE_BYTES:
        raise CommandError(f"the value has more than {MAX_VALUE_BYTES} bytes, the largest that is allowed", USAGE)
    agent.checked("PUT", _path(key), agent.request("PUT", _path(key), content=content))
    if json:
        write_json({"key": key, "bytes": len(content)})
    return OK


@store_command(context_settings={"ignore_unknown_options": True})
def add(
    agent: ServiceClient,
    key: KeyArgument,
    amount: Annotated[int, typer.Argument(metavar="AMOUNT", help="The number to add; may be negative.")] = 1,
    json: JsonOption = False,
) -> int:
    """Add to a number, and print the sum.

    A key that is not set counts as 0.
    """
    _check_keys(key)
    total = agent.post("/v1/store/add", {"key": key, "amount": amount})["value"]
    if json:
        write_json({"key": key, "value": total})
    else:
        write(f"{total}\n")
    return OK


@store_command()
def wait(
    agent: ServiceClient,
    names: Annotated[list[str], typer.Argument(metavar="KEY", help="The keys.")],
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.0, help=f"How long to wait; by default RANKMESH_TIMEOUT, or {DEFAULT_TIMEOUT:g}."
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Wait until all of these keys are set.

    Exit code 124: they were not set within --timeout.
    """
    _check_keys(*names)
    response = _polled(
        lambda wait: agent.request("POST", "/v1/store/wait", {"keys": names, "timeout": wait}, wait=wait),
        settings().timeout if timeout is None else timeout,
        HTTPStatus.REQUEST_TIMEOUT,
    )
    if _is_problem(response, HTTPStatus.REQUEST_TIMEOUT):
        print_error(response.json()["detail"])
        return TIMED_OUT
    agent.document_of("POST", "/v1/store/wait", response)
    if json:
        write_json({"keys": names})
    return OK


@store_command("keys")
def list_keys(
    agent: ServiceClient,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only keys that begin with this.")] = "",
    json: JsonOption = False,
) -> int:
    """List the keys, one a line, sorted.

    Exit code 0 also when there are none.
    """
    found = agent.get(f"/v1/store?prefix={quote(prefix, safe='')}")
    if json:
        write_json(found)
    else:
        lines = (key if key.isprintable() else key.encode("unicode_escape").decode("ascii") for key in found)
        write("".join(f"{line}\n" for line in lines))
    return OK


@store_command()
def delete(agent: ServiceClient, key: KeyArgument, json: JsonOption = False) -> int:
    """Remove a key.

    Exit code 1: there was none.
    """
    _check_keys(key)
    response = agent.request("DELETE", _path(key))
    found = not _is_problem(response, HTTPStatus.NOT_FOUND)
    if found:
        agent.checked("DELETE", _path(key), response)
    if json:
        write_json({"key": key, "deleted": found})
    elif not found:
        print_error(f"key {key!r} is not set")
    return OK if found else NEGATIVE


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None
