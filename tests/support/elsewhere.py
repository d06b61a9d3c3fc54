"""Another system than Linux, imitated: a prelude of a program that removes the modules and functions of Linux."""

from __future__ import annotations

_MAC = {
    "select": ["epoll", "EPOLLIN", "EPOLLOUT", "EPOLLRDHUP", "POLLRDHUP"],
    "os": ["eventfd", "eventfd_read", "eventfd_write", "memfd_create", "sched_getaffinity", "sched_setaffinity",
           "posix_fallocate", "pidfd_open", "O_PATH", "EFD_NONBLOCK", "EFD_CLOEXEC"],
    "socket": ["TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "TCP_INFO", "SO_PEERCRED", "AF_NETLINK", "MSG_NOSIGNAL",
               "SOCK_CLOEXEC", "SOCK_NONBLOCK"],
    "mmap": ["MADV_HUGEPAGE", "MAP_POPULATE"],
}  # fmt: skip
_WINDOWS = {
    "select": [*_MAC["select"], "poll", "POLLIN", "POLLOUT", "POLLERR", "POLLHUP"],
    "os": [*_MAC["os"], "fork", "forkpty", "register_at_fork", "getuid", "geteuid", "getgid", "getegid", "sched_yield",
           "getloadavg", "pread", "pwrite", "uname", "sysconf", "getpgid", "killpg", "waitid", "O_CLOEXEC",
           "O_NONBLOCK"],
    "socket": [*_MAC["socket"], "AF_UNIX", "MSG_DONTWAIT", "TCP_KEEPCNT", "TCP_KEEPINTVL"],
    "mmap": [*_MAC["mmap"], "MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS", "PROT_READ", "PROT_WRITE"],
    "signal": ["SIGKILL", "SIGHUP", "SIGCHLD", "SIGSTOP", "SIGCONT", "pthread_sigmask", "sigtimedwait", "setitimer"],
}  # fmt: skip
_MODULES = ["fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "_posixshmem"]

_PRELUDE = """
import asyncio, concurrent.futures, ctypes, http.client, importlib.metadata, mmap, multiprocessing, os, platform
import select, signal, socket, ssl, statistics, subprocess, sys, sysconfig, tempfile, threading, webbrowser
import cryptography.x509, numpy, rich.console, rich.live, rich.table, typer, typer.completion

sysconfig.get_config_vars(), platform.uname()

def _refuse(*arguments, **options):
    raise {error}

for _module, _names in {names!r}.items():
    for _name in _names:
        if hasattr(sys.modules[_module], _name):
            delattr(sys.modules[_module], _name)
for _name in {modules!r}:
    sys.modules[_name] = None
if {windows!r}:
    socket.socket.sendmsg = property(_refuse)
    socket.socket.recvmsg_into = property(_refuse)
    ctypes.CDLL = _refuse
sys.platform = {platform!r}
"""


def prelude(platform: str) -> str:
    """Return the first lines of a program that is to run as on ``darwin`` or ``win32``."""
    windows = platform == "win32"
    return _PRELUDE.format(
        platform=platform,
        names=_WINDOWS if windows else _MAC,
        modules=_MODULES if windows else [],
        windows=windows,
        error="AttributeError('not on Windows')",
    )
