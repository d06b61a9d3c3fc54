"""The command ``rankmesh`` as a process, jobs for it to look at, and gateways that say what a test has them say."""

from __future__ import annotations

import http.server
import io
import json
import os
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from unittest import mock

from support import forked_python
from support.processes import Ranks, wait_until

Result = TypeVar("Result")
COMMAND = [sys.executable, "-c", "from rankmesh.cli import main; main()"]
SECONDS = 180.0
OURS = ("RANKMESH_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "COLUMNS", "LINES", "TERM", "NO_COLOR", "FORCE_COLOR")
SCRIPT = """
import sys, time
from pathlib import Path
import numpy as np
import rankmesh as dist

dist.init_process_group()
pair = dist.new_group([0, 2])
end, over = Path(sys.argv[1]), np.zeros(1)
while not over[0]:
    dist.all_reduce(np.ones(1000, np.float32))
    over[0] = end.exists()
    dist.broadcast(over, 0)
    time.sleep(0.1)
dist.destroy_process_group()
"""


class Done(NamedTuple):
    """How a command ended, and what it wrote."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """The JSON document on standard output."""
        return json.loads(self.stdout)


def environment(**variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return {**inherited, **variables}


def rankmesh(*arguments: str, stdin: bytes = b"", **variables: str) -> Done:
    """Run a command to its end."""
    command = [*COMMAND, *arguments]
    done = forked_python.run(command, stdin=stdin, env=environment(**variables), cwd=os.getcwd(), timeout=SECONDS)
    return Done(done.returncode, done.stdout.decode(errors="surrogateescape"), done.stderr.decode())


def here(*arguments: str, stdin: bytes = b"", **variables: str) -> Done:
    """Run a command to its end in this process, one at a time: a process takes longer to start than most take."""
    from rankmesh.cli import main

    given, stdout, stderr = io.BytesIO(stdin), io.BytesIO(), io.BytesIO()
    with (
        mock.patch.dict(os.environ, environment(**variables), clear=True),
        mock.patch.object(sys, "argv", ["rankmesh", *arguments]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(given)),
        mock.patch.object(sys, "stdout", io.TextIOWrapper(stdout, write_through=True)),
        mock.patch.object(sys, "stderr", io.TextIOWrapper(stderr, write_through=True)),
    ):
        code: Any = "none: it has returned"
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        return Done(code, stdout.getvalue().decode(errors="surrogateescape"), stderr.getvalue().decode())


def until_it_fits(run: Callable[[], Result], fits: Callable[[Result], bool], seconds: float = 60.0) -> Result:
    """Run a command until its result fits, and return that.

    A rank that has no processor for a second or more answers nothing for so long: commands report it, and rightly so.
    """
    deadline = time.monotonic() + seconds
    while not fits(result := run()):
        assert time.monotonic() < deadline, f"after {seconds:g} s: {result}"
        time.sleep(0.1)
    return result


class Job:
    """A job of three ranks that runs until it is told to end.

    Attributes:
        url: its gateway's.
        token: its token.
    """

    def __init__(self, ranks: Ranks, token: str) -> None:
        self.token = token
        script = ranks.folder / "script.py"
        script.write_text(SCRIPT)
        self._end = ranks.folder / "end"
        # With env, for commands find its token in its environment in /proc, which a forked process does not have there.
        command = ["env", sys.executable, "-m", "rankmesh.run", "--nproc-per-node", "3", str(script), str(self._end)]
        self._launcher = ranks.launch(command, name="launcher", RANKMESH_TOKEN=token)
        pattern = r"gateway (http://\S+)"
        self.url: str = wait_until(lambda: re.search(pattern, self._launcher.stderr), f"{self._launcher}")[1]
        self.all_alive()
        wait_until(self._is_reported, f"the reports on both groups: {self._launcher}")

    def _is_reported(self) -> bool:
        """Whether all members of the groups have reported them: a rank reports them only after it has joined."""
        groups = self.ask("/v1/groups")
        return len(groups) == 2 and all(len(each["seqs"]) == len(each["ranks"]) for each in groups)

    def alive(self) -> list[dict[str, Any]]:
        return [each for each in self.ask("/v1/ranks") if each["state"] == "alive"]

    def all_alive(self) -> list[dict[str, Any]]:
        """Wait until all ranks are alive, and return them: one that is not heard for 3 s is suspect for a while."""
        return wait_until(lambda: len(found := self.alive()) == 3 and found, f"three ranks: {self._launcher}")

    def ask(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.token}"})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.loads(answer.read())
        except OSError:
            return []

    def __call__(self, *arguments: str, stdin: bytes = b"", **variables: str) -> Done:
        """Run a command about this job."""
        return rankmesh(*arguments, stdin=stdin, **self._variables(variables))

    def here(self, *arguments: str, stdin: bytes = b"", **variables: str) -> Done:
        """Run a command about this job in this process: see here()."""
        return here(*arguments, stdin=stdin, **self._variables(variables))

    def end(self) -> None:
        self._end.touch()
        assert self._launcher.process.wait(SECONDS) == 0, self._launcher

    def _variables(self, others: dict[str, str]) -> dict[str, str]:
        return {"RANKMESH_GATEWAY": self.url, "RANKMESH_TOKEN": self.token, **others}


Answers = dict[str, Any]


class Double:
    """Something at an address that answers GET with documents by path, else with a problem; not at all once gone."""

    def __init__(self) -> None:
        self.answers: Answers = {}
        self.asked: list[str] = []
        self.gone = False
        double = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                double.asked.append(self.path)
                if double.gone:
                    self.close_connection = True
                    return
                found = double.answers.get(self.path)
                status = 404 if found is None else 200
                problem = {"type": "about:blank", "title": "Not Found", "status": 404, "detail": "?"}
                body = json.dumps({**problem, "code": "not-found"} if found is None else found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
