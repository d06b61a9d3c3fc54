"""A gateway or an agent, as a command asks it: JSON, or the one line that says why there is none."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from rankmesh._cli.exit_codes import FAILED, NOBODY, REFUSED, CommandError

if TYPE_CHECKING:
    from rankmesh_agent.net.http_client import HttpResponse

ANSWER_SECONDS = 20.0
"""How long an answer may take: an agent that nobody has asked before has to load its web framework."""


class Service:
    """Somebody to ask.

    Args:
        what: what it is, in a word, for messages.
        url: its base URL.
        token: the job's token, empty for none.
        patience: seconds that an answer may take.
    """

    def __init__(self, what: str, url: str, token: str, patience: float = ANSWER_SECONDS) -> None:
        from rankmesh_agent.net.http_client import HttpClient

        self.what = what
        self.url = url
        self.token = token
        self._patience = patience
        self._asker = HttpClient(token)

    def ask(self, method: str, path: str, document: Any = None) -> HttpResponse:
        """Ask, and return the answer whatever its status.

        Raises:
            CommandError: there is none.
        """
        from rankmesh_agent.net.http_client import NoResponseError

        try:
            return self._asker.request(method, self.url + path, document, timeout=self._patience)
        except NoResponseError as error:
            hint = {
                "gateway": "is the job still running? --gateway or RANKMESH_GATEWAY says where its gateway is",
            }.get(self.what, "'rankmesh status' shows whether it is alive")
            raise CommandError(f"no {self.what} answers at {self.url}: {error}; {hint}", NOBODY) from error

    def get(self, path: str) -> Any:
        """Return what is there.

        Raises:
            CommandError: there is no answer, or it is not what was asked for.
        """
        return self.meaning("GET", path, self.ask("GET", path))

    def post(self, path: str, document: Any) -> Any:
        """Send a document and return the answer.

        Raises:
            CommandError: there is no answer, or it is not what was asked for.
        """
        return self.meaning("POST", path, self.ask("POST", path, document))

    def meaning(self, method: str, path: str, answer: HttpResponse) -> Any:
        """Return the document that an answer holds.

        Raises:
            CommandError: it holds a problem, or something that is not RankMesh's.
        """
        try:
            document = answer.json()
        except ValueError:
            raise self._stranger(answer) from None
        if answer.status < HTTPStatus.BAD_REQUEST:
            return document
        if not isinstance(document, dict) or "code" not in document:
            raise self._stranger(answer)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            how = "refuses the token given" if self.token else "asks for the job's token"
            raise CommandError(
                f"the {self.what} at {self.url} {how}; set RANKMESH_TOKEN to the job's, or give --token-file", REFUSED
            )
        if answer.status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED) and document["code"] in (
            "not-found",
            "method-not-allowed",
        ):
            raise CommandError(
                f"the {self.what} at {self.url} does not know {method} {path}: it is of an older version than this "
                "command; upgrade RankMesh there",
                FAILED,
            )
        raise CommandError(f"the {self.what} at {self.url} says: {document.get('detail', document['code'])}", FAILED)

    def _stranger(self, answer: HttpResponse) -> CommandError:
        return CommandError(
            f"{self.url} is not a RankMesh {self.what}: its answer ({answer.status}) is not RankMesh's; is the port "
            "another program's?"
        )

    def close(self) -> None:
        """Close the connection."""
        self._asker.close()
