"""JSON client of a gateway or an agent, with errors as one line for the user."""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from rankmesh._cli.exit_codes import FAILED, UNAUTHORIZED, UNREACHABLE, CommandError

if TYPE_CHECKING:
    from rankmesh_agent.net.http_client import HttpResponse

RESPONSE_SECONDS = 20.0
"""Timeout of a request: an agent loads its web framework at the first one."""


class ServiceClient:
    """Client of one service."""

    def __init__(self, kind: str, url: str, token: str, timeout: float = RESPONSE_SECONDS) -> None:
        from rankmesh_agent.net.http_client import HttpClient

        self.kind = kind
        self.url = url
        self.token = token
        self._timeout = timeout
        self._credentials: dict[str, str] = {}
        self._http = HttpClient(token)

    def credential_for(self, job: str) -> str:
        """Return the credential for the agents of a job at this gateway.

        It is the job's if that can be derived from the token, which the gateway shows by accepting it: the job's ranks
        may know no other one. From a credential of a lesser role none can; agents that know the token accept it.
        """
        from rankmesh_agent.wire.credentials import for_job
        from rankmesh_agent.wire.errors import ForbiddenJobError

        if not self.token or not job:
            return self.token
        if job not in self._credentials:
            try:
                derived = for_job(self.token, job)
            except ForbiddenJobError as error:
                raise CommandError(error.message, UNAUTHORIZED) from error
            with contextlib.closing(ServiceClient(self.kind, self.url, derived, self._timeout)) as other:
                accepted = other.request("GET", "/livez").status != HTTPStatus.UNAUTHORIZED
            self._credentials[job] = derived if accepted else self.token
        return self._credentials[job]

    def request(
        self, method: str, path: str, document: Any = None, *, content: bytes = b"", wait: float = 0.0
    ) -> HttpResponse:
        """Send a request and return the response, whatever its status; ``wait`` is in addition to the timeout."""
        from rankmesh_agent.net.http_client import NoResponseError, UnauthenticatedServerError

        try:
            timeout = self._timeout + wait
            return self._http.request(method, self.url + path, document, content=content, timeout=timeout)
        except UnauthenticatedServerError as error:
            raise CommandError(f"{self.url} is not a RankMesh {self.kind} of this job: {error}") from error
        except NoResponseError as error:
            hint = {
                "gateway": "is the job still running? --gateway or RANKMESH_GATEWAY has the URL of its gateway"
            }.get(self.kind, "'rankmesh status' shows whether it is alive")
            raise CommandError(f"no {self.kind} answers at {self.url}: {error}; {hint}", UNREACHABLE) from error

    def get(self, path: str) -> Any:
        """Return the document at a path."""
        return self.document_of("GET", path, self.request("GET", path))

    def post(self, path: str, document: Any) -> Any:
        """Post a document and return the one in the response."""
        return self.document_of("POST", path, self.request("POST", path, document))

    def checked(self, method: str, path: str, response: HttpResponse) -> HttpResponse:
        """Return a response, of any content, that is no problem."""
        if response.status >= HTTPStatus.BAD_REQUEST:
            self.document_of(method, path, response)
        return response

    def document_of(self, method: str, path: str, response: HttpResponse) -> Any:
        """Return the document of a response that is no problem, and from RankMesh."""
        try:
            document = response.json()
        except ValueError:
            raise self._foreign_response(response) from None
        if response.status < HTTPStatus.BAD_REQUEST:
            return document
        if not isinstance(document, dict) or "code" not in document:
            raise self._foreign_response(response)
        if response.status == HTTPStatus.UNAUTHORIZED:
            how = "has another token than the one given" if self.token else "asks for the job's token"
            remedy = (
                "set RANKMESH_TOKEN to the job's, which 'rankmesh token' prints beside its ranks, or give --token-file"
            )
            raise CommandError(f"the {self.kind} at {self.url} {how}; {remedy}", UNAUTHORIZED)
        if response.status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED) and document["code"] in (
            "not-found",
            "method-not-allowed",
        ):
            raise CommandError(
                f"the {self.kind} at {self.url} does not know {method} {path}: it is of an older version than this "
                "command; upgrade RankMesh there",
                FAILED,
            )
        raise CommandError(f"the {self.kind} at {self.url} says: {document.get('detail', document['code'])}", FAILED)

    def _foreign_response(self, response: HttpResponse) -> CommandError:
        return CommandError(
            f"{self.url} is not a RankMesh {self.kind}: its answer ({response.status}) is not RankMesh's; is the port "
            "another program's?"
        )

    def close(self) -> None:
        """Close the connection."""
        self._http.close()
