"""What the environment says, and when a token is needed."""

from __future__ import annotations

import dataclasses
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from rankmesh_agent.config.addresses import resolves_to_loopback
from rankmesh_agent.config.settings import (
    DEFAULT_TIMEOUT,
    Settings,
    create_token,
    read_token,
    require_token_beyond_loopback,
)
from rankmesh_agent.wire.credentials import for_job
from rankmesh_agent.wire.errors import ForbiddenJobError

VARIABLES = [
    ("RANK", "3", "rank", 3),
    ("RANK", " 3 ", "rank", 3),
    ("RANK", "0", "rank", 0),
    ("WORLD_SIZE", "8", "world_size", 8),
    ("LOCAL_RANK", "1", "local_rank", 1),
    ("MASTER_ADDR", "node0", "master_addr", "node0"),
    ("MASTER_PORT", "29500", "master_port", 29500),
    ("MASTER_PORT", "65535", "master_port", 65535),
    ("RANKMESH_GATEWAY", "http://gateway:8000", "gateway", "http://gateway:8000"),
    ("RANKMESH_JOB", "night", "job", "night"),
    ("RANKMESH_TOKEN", "secret", "token", "secret"),
    ("RANKMESH_TRANSPORT", "tcp", "transport", "tcp"),
    ("RANKMESH_TRANSPORT", "SHM", "transport", "shm"),
    ("RANKMESH_TRANSPORT", "auto", "transport", "auto"),
    ("RANKMESH_BIND", "10.0.0.5", "bind", "10.0.0.5"),
    ("RANKMESH_ADVERTISE", "10.0.0.5, node5,,fe80::1 ", "advertise", ("10.0.0.5", "node5", "fe80::1")),
    ("GLOO_SOCKET_IFNAME", "eth0", "interface", "=eth0"),
    ("GLOO_SOCKET_IFNAME", "eth0,eth1", "interface", "=eth0,eth1"),
    ("GLOO_SOCKET_IFNAME", "^docker", "interface", "^docker"),
    ("NCCL_SOCKET_IFNAME", "ib0", "interface", "ib0"),
    ("RANKMESH_SHM_DIR", "/mnt/shm", "shm_dir", "/mnt/shm"),
    ("RANKMESH_SLOT_BYTES", "4096", "slot_bytes", 4096),
    ("RANKMESH_EAGER_BYTES", "0", "eager_bytes", 0),
    ("RANKMESH_EAGER_BYTES", "1048576", "eager_bytes", 1 << 20),
    ("RANKMESH_TIMEOUT", "2.5", "timeout", 2.5),
    ("RANKMESH_MAX_BODY", "1", "max_body", 1),
    ("RANKMESH_TOKEN_USE", "u" * 16, "token_use", "u" * 16),
    ("RANKMESH_TOKEN_READ", "r" * 16, "token_read", "r" * 16),
    ("RANKMESH_PRIVATE_NETWORK", "1", "private_network", True),
    ("RANKMESH_STORE_KEYS", "1", "store_keys", 1),
    ("RANKMESH_STORE_BYTES", "1", "store_bytes", 1),
    ("RANKMESH_DUMP_DIR", "/tmp/dumps", "dump_dir", "/tmp/dumps"),
    ("RANKMESH_PICKLE", "never", "pickle", "never"),
    ("RANKMESH_PICKLE", "Authenticated", "pickle", "authenticated"),
]


@pytest.mark.parametrize(("variable", "text", "field", "value"), VARIABLES)
def test_each_variable(variable, text, field, value):
    assert Settings.from_env({variable: text}) == dataclasses.replace(Settings(), **{field: value})


def test_nothing_set_is_the_defaults():
    assert Settings.from_env({}) == Settings()
    assert Settings().timeout == DEFAULT_TIMEOUT == 30 * 60


def test_an_empty_variable_is_one_that_is_not_set():
    for variable, *_ in VARIABLES:
        assert Settings.from_env({variable: ""}) == Settings()


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().rank = 1


NUMBERS = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE",
    "SLURM_JOB_ID",
    "JOB_COMPLETION_INDEX",
]
"""Variables with a number; test_launchers has what is made of those of launchers."""


def test_gloos_interface_comes_before_nccls():
    assert Settings.from_env({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}).interface == "=eth0"


@pytest.mark.parametrize(
    ("variable", "texts"),
    [
        *((name, ("one", "-1", "1.5")) for name in NUMBERS),
        *((name, ("0",)) for name in ("WORLD_SIZE", "PMI_SIZE")),
        ("MASTER_PORT", ("65536", "-1", "http")),
        ("RANKMESH_SLOT_BYTES", ("4095", "0", "1M")),
        ("RANKMESH_EAGER_BYTES", ("-1", str((1 << 20) + 1))),
        ("RANKMESH_MAX_BODY", ("0", "1G")),
        ("RANKMESH_STORE_KEYS", ("0", "1M")),
        ("RANKMESH_STORE_BYTES", ("0", "1G")),
        ("RANKMESH_TIMEOUT", ("0", "-1", "nan", "30s")),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(variable, texts):
    for text in texts:
        with pytest.raises(ValueError, match=f"^{variable}="):
            Settings.from_env({variable: text})


@pytest.mark.parametrize(
    ("variable", "texts", "remedy"),
    [
        ("RANKMESH_TRANSPORT", ("udp",), "set it to 'tcp' or 'shm', or leave it out"),
        ("RANKMESH_PICKLE", ("always", "0"), "set it to 'authenticated' or 'never', or leave it out"),
        ("RANKMESH_HOSTING", ("elsewhere",), "set it to 'attached' or 'embedded', or leave it out"),
        ("RANKMESH_DEBUG", ("TRACE",), "set it to OFF, INFO or DETAIL, or leave it out"),
        ("TORCH_DISTRIBUTED_DEBUG", ("1",), "set it to OFF, INFO or DETAIL, or leave it out"),
    ],
)
def test_a_value_that_is_no_choice_is_refused_with_those_there_are(variable, texts, remedy):
    for text in texts:
        with pytest.raises(ValueError, match=f"^{variable}='{text}': {remedy}$"):
            Settings.from_env({variable: text})


LOOPBACK = ["127.0.0.1", "127.8.9.10", "localhost", "LOCALHOST", "::1", "[::1]", "debian", "ours"]
REACHABLE = ["0.0.0.0", "::", "[::]", "", "10.0.0.5", "192.168.1.2"]
REACHABLE += ["fe80::1", "2001:db8::1", "node5", "localhost.evil.com", "unknown"]
NAMES = {"debian": ["127.0.1.1"], "ours": ["127.0.0.1", "::1"], "node5": ["127.0.1.1", "10.0.0.5"]}
NAMES |= {"localhost.evil.com": ["10.6.6.6"]}


def lookup(name, port, **options):
    if name not in NAMES:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in NAMES[name]]


def test_where_others_reach_us_a_token_is_needed(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    for host in LOOPBACK:
        assert resolves_to_loopback(host)
        require_token_beyond_loopback(host, "", "the agent")
    for host in REACHABLE:
        assert not resolves_to_loopback(host)
        require_token_beyond_loopback(host, "0123456789abcdef", "the agent")
        with pytest.raises(ValueError, match=r"with a token of fewer than 16 characters\. Set RANKMESH_TOKEN"):
            require_token_beyond_loopback(host, "0123456789abcde", "the agent")
        with pytest.raises(ValueError, match=r"the agent would listen on .* without a token\. Set RANKMESH_TOKEN"):
            require_token_beyond_loopback(host, "", "the agent")


def test_the_token_may_be_in_a_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("from the file\n")
    assert Settings.from_env({"RANKMESH_TOKEN_FILE": str(path)}).token == "from the file"
    assert Settings.from_env({"RANKMESH_TOKEN_FILE": str(path), "RANKMESH_TOKEN": "secret"}).token == "secret"
    with pytest.raises(ValueError, match=r"RANKMESH_TOKEN_FILE=.*other: No such file"):
        Settings.from_env({"RANKMESH_TOKEN_FILE": str(tmp_path / "other")})


def test_the_credential_of_a_job_names_it():
    token = for_job("secret", "my job")
    found = Settings.from_env({"RANKMESH_TOKEN": token})
    assert (found.job, found.names_job, found.job_token) == ("my job", True, token)
    other = Settings.from_env({"RANKMESH_TOKEN": token, "RANKMESH_JOB": "another"})
    assert other.job == "another"
    with pytest.raises(ForbiddenJobError, match="is the credential of job 'my job', and this is for job 'another'"):
        assert other.job_token
    assert Settings.from_env({"RANKMESH_TOKEN": for_job("secret", "default")}).names_job
    plain = Settings.from_env({"RANKMESH_TOKEN": "secret"})
    assert (plain.job, plain.names_job, plain.job_token) == ("default", False, for_job("secret", "default"))
    assert Settings().job_token == ""


def test_an_incomplete_credential_of_a_job_is_an_error(tmp_path):
    cut = for_job("secret", "my job")[:-1]
    path = tmp_path / "token"
    path.write_text(cut)
    for environ in ({"RANKMESH_TOKEN": cut}, {"RANKMESH_TOKEN_FILE": str(path)}):
        with pytest.raises(ValueError, match="is not complete"):
            Settings.from_env(environ)


def test_a_fresh_token_is_made_once(tmp_path):
    path = tmp_path / "token"
    with ThreadPoolExecutor(8) as makers:
        list(makers.map(create_token, [path] * 8))
    token = read_token(path)
    assert len(token) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    create_token(path)
    assert read_token(path) == token
    assert os.listdir(tmp_path) == ["token"]
    create_token(tmp_path / "other")
    assert read_token(tmp_path / "other") != token


@pytest.mark.parametrize("name", ["RANKMESH_TOKEN_USE", "RANKMESH_TOKEN_READ"])
def test_a_short_credential_of_a_role_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} has fewer than 16 characters"):
        Settings.from_env({name: "15 characters ."})


@pytest.mark.parametrize(
    ("variables", "torchruns"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, True),
        ({"TORCHELASTIC_RUN_ID": "train", "RANKMESH_JOB": "train"}, True),
        ({"TORCHELASTIC_RUN_ID": "train", "RANKMESH_LAUNCHED": '{"TORCHELASTIC_RUN_ID": "train"}'}, False),
        ({"RANKMESH_LAUNCHED": '{"TORCHELASTIC_RUN_ID": "train"}'}, False),
        ({"TORCHELASTIC_RUN_ID": "none", "RANKMESH_LAUNCHED": '{"TORCHELASTIC_RUN_ID": "train"}'}, True),
    ],
    ids=["torchrun", "torchrun for a named job", "rankmesh run", "its rank's inner job", "torchrun in its rank"],
)
def test_the_store_of_rankmesh_run_is_not_taken_for_torchruns(variables, torchruns):
    settings = Settings.from_env({"TORCHELASTIC_USE_AGENT_STORE": "True", **variables})
    assert settings.torchrun_store == torchruns
