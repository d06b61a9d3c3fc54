"""The dashboard: a static page and its parts, to be served as they lie here. All data comes from the HTTP interface."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE = "index.html"
"""The page; the others are its parts."""
PREFIX = "/dashboard/"
"""Where the parts are served; the page is at the root."""

HEADERS: Mapping[str, str] = {
    # Nothing but our own files is loaded, run or asked, and text can not become markup: there is no sink for it.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # Asked for anew each time and answered with 304, so that page and gateway are always of the same version.
    "cache-control": "no-cache",
}
"""What every file is served with."""


@dataclass(frozen=True)
class File:
    """A file to be served.

    Attributes:
        body: its bytes.
        media_type: what they are.
        etag: changes when they do.
    """

    body: bytes
    media_type: str
    etag: str

    def matches(self, if_none_match: str) -> bool:
        """Whether a client that sends this has the file already (RFC 9110, 13.1.2: tags are compared weakly)."""
        tags = (tag.strip().removeprefix("W/") for tag in if_none_match.split(","))
        return any(tag in ("*", self.etag) for tag in tags)


@cache
def names() -> frozenset[str]:
    """The names of the files."""
    return frozenset(path.name for path in _FOLDER.iterdir() if path.suffix in _MEDIA_TYPES)


def paths() -> frozenset[str]:
    """The paths under which they are served."""
    return frozenset({"/", *(PREFIX + name for name in names() - {PAGE})})


@cache
def file(name: str) -> File:
    """Return a file; ``name`` is one of names()."""
    body = (_FOLDER / name).read_bytes()
    return File(body, _MEDIA_TYPES[Path(name).suffix], f'"{hashlib.sha256(body).hexdigest()[:20]}"')
