"""``rankmesh tls make``."""

from __future__ import annotations

import pytest
from cryptography import x509
from support.command import Done, here


def make(*arguments: str) -> Done:
    return here("tls", "make", *arguments)


def test_each_host_gets_a_certificate_with_its_names(tmp_path):
    made = make(str(tmp_path), "--host", "node1,10.0.0.5,fe80::1", "--host", "node2", "--days", "30")
    assert made.code == 0, made.stderr
    assert f"export RANKMESH_TLS_CERT={tmp_path}/node2.pem" in made.stdout
    found = x509.load_pem_x509_certificate((tmp_path / "node1.pem").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["node1", "localhost"]
    addresses = [*map(str, names.get_values_for_type(x509.IPAddress))]
    assert addresses == ["10.0.0.5", "fe80::1", "127.0.0.1", "::1"]
    assert 29 <= (found.not_valid_after_utc - found.not_valid_before_utc).days <= 30
    found.verify_directly_issued_by(x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes()))


def test_only_the_owner_can_read_the_keys(tmp_path):
    assert make(str(tmp_path / "new"), "--host", "node1").code == 0
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()}
    assert modes == {"ca.pem": 0o644, "ca-key.pem": 0o600, "node1.pem": 0o644, "node1-key.pem": 0o600}
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_host_that_is_added_later_has_the_same_authority(tmp_path):
    make(str(tmp_path), "--host", "node1")
    before = (tmp_path / "ca.pem").read_bytes()
    assert make(str(tmp_path), "--host", "node2").code == 0
    assert (tmp_path / "ca.pem").read_bytes() == before
    authority = x509.load_pem_x509_certificate(before)
    x509.load_pem_x509_certificate((tmp_path / "node2.pem").read_bytes()).verify_directly_issued_by(authority)


@pytest.mark.parametrize("host", ["../node", "", "a b", "ca"])
def test_what_is_no_host(tmp_path, host):
    made = make(str(tmp_path), "--host", host)
    assert made.code == 2
    assert made.stderr.startswith("rankmesh: ")
