"""``file:///path``: a shared file contains the addresses of the gateways.

The file is one of keys and values, as a FileStore's, with the address of each job's gateway. A process that finds none,
or one whose gateway has ended, starts the gateway and writes its address in the same transaction.

Another user could name a gateway of its own in the file, and a path may by mistake be that of a file with other
content. So a file is refused unless it is a regular one of this user that is empty or was written by this module.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rankmesh._rendezvous.hosted import GatewayAddress, HostedGateway
from rankmesh._rendezvous.locator import GatewayLocator, configured_address
from rankmesh._stores.key_file import ForeignFileError, KeyFile, MovedFileError
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.store.table import Changes, Values
from rankmesh_agent.wire.errors import DistNetworkError, DistStoreError

_PREFIX = "rankmesh/gateway/"


class FileLocator(GatewayLocator):
    """The first process to open the file hosts the gateway, whatever its rank.

    Args:
        path: the file, in an existing directory; created if needed, and removed with the last gateway in it.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        super().__init__(settings, configured_address(settings))
        self._path = path
        self._key = _PREFIX + settings.job

    def find(self) -> str | None:
        if self._hosted is not None:
            self._hosted.raise_failure()
            return self._hosted.address.url
        with contextlib.suppress(MovedFileError), self._open() as file:  # an ending job may remove the file meanwhile
            before = file.value(self._key)
            there = None if before is None else GatewayAddress.from_json(before)
            is_there = there is not None and there.is_there()
            if there is not None and is_there:
                return there.url
            if is_there is False:
                return self._host(file, before)
        return None

    def close(self) -> None:
        if self._hosted is not None:
            with contextlib.suppress(ValueError, DistNetworkError, MovedFileError):
                self._erase()
        super().close()

    @contextlib.contextmanager
    def _open(self) -> Iterator[KeyFile]:
        self._check_ours()
        try:
            with contextlib.closing(KeyFile(str(self._path))) as file:
                with contextlib.suppress(FileNotFoundError):
                    os.chmod(self._path, 0o600)  # that of an earlier job may be an empty file that others could read
                yield file
        except ForeignFileError as error:
            raise self._refusal("it has other content than the addresses of gateways") from error
        except MovedFileError:
            raise
        except DistStoreError as error:
            if not os.access(self._path.parent, os.W_OK):
                raise ValueError(
                    f"file://{self._path}: the file is made if needed, but its directory must exist and be writable"
                ) from error
            raise DistNetworkError(
                f"cannot use file://{self._path}: {error.message}; tcp://host:port needs no file",
                address=str(self._path),
            ) from error

    def _host(self, file: KeyFile, before: bytes | None) -> str | None:
        """Start the gateway, unless another process has done so since ``before`` was read."""

        def host(values: Values) -> tuple[str | None, Changes]:
            if values.get(self._key) != before:
                return None, {}
            self._hosted = HostedGateway(self.bind_host, 0, self._settings)
            return self._hosted.address.url, {self._key: self._hosted.address.to_json().encode()}

        try:
            return file.change(host)
        except BaseException:
            super().close()
            raise

    def _erase(self) -> None:
        """Remove this job, and jobs whose gateways have ended, from the file; remove the file after the last job."""
        with self._open() as file:
            jobs = {key: file.value(key) for key in file.keys(_PREFIX)}
            addresses = {key: GatewayAddress.from_json(value or b"") for key, value in jobs.items()}
            over = [
                key
                for key, there in addresses.items()
                if key == self._key or there is None or there.is_there() is False
            ]
            file.change(lambda values: (None, {key: None for key in over if values.get(key) == jobs[key]}))
            file.remove_if_empty()

    def _check_ours(self) -> None:
        """Raise ValueError unless the file is this user's, or does not exist."""
        try:
            found = os.lstat(self._path)
        except OSError:
            return  # to open it reports why
        if stat.S_ISLNK(found.st_mode):
            raise self._refusal("it is a symbolic link")
        if not stat.S_ISREG(found.st_mode):
            raise self._refusal("it is not a regular file")
        if found.st_uid != os.geteuid():
            raise self._refusal(f"it belongs to user {found.st_uid}, and this process to user {os.geteuid()}")
        if found.st_mode & stat.S_IWOTH:
            raise self._refusal(f"other users can write to it (mode {stat.S_IMODE(found.st_mode):o})")

    def _refusal(self, why: str) -> ValueError:
        return ValueError(
            f"file://{self._path} is refused, and was not changed: {why}; remove it, or choose another path"
        )
