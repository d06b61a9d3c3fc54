"""Dashboard: a static page and its parts. All data comes from the HTTP interface."""

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
"""The page; the other files are its parts."""
PREFIX = "/dashboard/"
"""Path prefix of the parts; the page is at the root."""

HEADERS: Mapping[str, str] = {
    # Only this package's files are loaded and run, and text cannot become markup: there is no sink for it.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # Revalidated at each load, so that page and gateway always have the same version.
    "cache-control": "no-cache",
}
"""Headers of every file."""


@dataclass(frozen=True)
class File:
    """A file.

    Attributes:
        body: its bytes.
        media_type: its media type.
        etag: a hash of the bytes.
    """

    body: bytes
    media_type: str
    etag: str

    def matches(self, if_none_match: str) -> bool:
        """Return whether an If-None-Match header has the file's tag (RFC 9110, 13.1.2: tags are compared weakly)."""
        tags = (tag.strip().removeprefix("W/") for tag in if_none_match.split(","))
        return any(tag in ("*", self.etag) for tag in tags)


@cache
def names() -> frozenset[str]:
    """Return the names of the files."""
    return frozenset(path.name for path in _FOLDER.iterdir() if path.suffix in _MEDIA_TYPES)


def paths() -> frozenset[str]:
    """Return the paths of the page and its parts."""
    return frozenset({"/", *(PREFIX + name for name in names() - {PAGE})})


def media_type(name: str) -> str:
    """Return the media type of a file."""
    return _MEDIA_TYPES[Path(name).suffix]


@cache
def file(name: str) -> File:
    """Return a file; ``name`` is one of names()."""
    body = (_FOLDER / name).read_bytes()
    return File(body, media_type(name), f'"{hashlib.sha256(body).hexdigest()[:20]}"')
