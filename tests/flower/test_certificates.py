"""Certificates and node keys of a federation."""

import datetime
import socket
import ssl
import stat
import threading
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from simfbo import UserError
from simfbo.cli.main import main
from simfbo.flower.ops import certificates, control
from simfbo.flower.ops.folder import Layout, Setup


def setup(**changes):
    usual = {"address": "127.0.0.1:9300", "nodes": [1, 2], "parts": 2, "base_port": 9300}
    return Setup(**usual | changes)


def test_certificates_and_keys(tmp_path, capsys):
    folder = tmp_path / "federation"
    words = ["certs", "--folder", str(folder), "--host", "a.example.org", "--nodes", "2"]
    assert main(["flower", *words]) == 0
    private = [*(folder / "certificates").glob("*.key"), folder / "superexec.secret"]
    private += [folder / "keys" / "node-1", folder / "keys" / "node-2"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in private} == {0o600}
    server = x509.load_pem_x509_certificate((folder / "certificates/server.crt").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"a.example.org", "localhost"} <= set(names.get_values_for_type(x509.DNSName))
    assert "127.0.0.1" in map(str, names.get_values_for_type(x509.IPAddress))
    key = load_ssh_private_key((folder / "keys" / "node-1").read_bytes(), None)
    public = load_ssh_public_key((folder / "keys" / "node-1.pub").read_bytes())
    assert key.public_key() == public
    assert key.curve.name == "secp384r1"
    before = {file.name: file.read_bytes() for file in (folder / "keys").iterdir()}
    authority = (folder / "certificates/ca.crt").read_bytes()
    for flags in (["--nodes", "3"], ["--nodes", "3", "--host", "b.example.org"]):
        assert main(["flower", "certs", "--folder", str(folder), *flags]) == 0
    out = capsys.readouterr().out
    assert "Created node-3." in out
    assert "server.crt for b.example.org, a.example.org" in out
    after = {file.name: file.read_bytes() for file in (folder / "keys").iterdir()}
    assert {name: after[name] for name in before} == before
    assert (folder / "certificates/ca.crt").read_bytes() == authority
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "superlink.db").touch()
    assert main(["flower", "certs", "--folder", str(folder), "--nodes", "2", "--new"]) == 0
    assert (folder / "certificates/ca.crt").read_bytes() != authority
    assert not (folder / "superlink.db").exists()
    assert sorted(file.name for file in (folder / "keys").glob("*.pub")) == [
        "node-1.pub", "node-2.pub"
    ]  # fmt: skip


def test_a_made_certificate_is_trusted_by_its_authority_alone(tmp_path):
    for name in ("ours", "theirs"):
        certificates.make_authority(tmp_path / name)
        certificates.make_server_certificate(tmp_path / name, ["server.example.org"])

    def handshake(authority, host):
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(tmp_path / "ours/server.crt", tmp_path / "ours/server.key")
        client = ssl.create_default_context(cafile=str(tmp_path / authority / "ca.crt"))
        here, there = socket.socketpair()
        job = threading.Thread(target=lambda: _serve(server, there), daemon=True)
        job.start()
        with client.wrap_socket(here, server_hostname=host):
            return True

    def _serve(context, end):
        try:
            context.wrap_socket(end, server_side=True).close()
        except OSError:
            end.close()

    assert handshake("ours", "server.example.org")
    assert handshake("ours", "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake("theirs", "server.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake("ours", "other.example.org")


def test_admit_keeps_a_key_before_anything_is_up(tmp_path, capsys):
    folder = tmp_path / "federation"
    certificates.make_node_key(tmp_path / "node-9")
    assert main(["flower", "admit", "--folder", str(folder), str(tmp_path / "node-9.pub")]) == 0
    assert Layout(folder).public_keys() == [folder / "keys" / "node-9.pub"]
    before = (folder / "keys" / "node-9.pub").read_bytes()
    assert main(["flower", "certs", "--folder", str(folder), "--nodes", "9"]) == 0
    assert (folder / "keys" / "node-9.pub").read_bytes() == before
    assert not (folder / "keys" / "node-9").exists()
    (tmp_path / "bad.pub").write_text("ssh-rsa AAAA")
    assert main(["flower", "admit", "--folder", str(folder), str(tmp_path / "bad.pub")]) == 2


def test_an_expired_certificate(tmp_path, monkeypatch):
    place = Layout(tmp_path)
    control.create_missing(place, [], 2)
    place.require_certificates(setup())
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=400)
    clock = SimpleNamespace(now=lambda zone: later)
    monkeypatch.setattr(certificates, "datetime", SimpleNamespace(datetime=clock, UTC=datetime.UTC))
    with pytest.raises(UserError, match="has expired"):
        place.require_certificates(setup())
