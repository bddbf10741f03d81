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
from simfbo.flower.ops import certificates, credentials, operators
from simfbo.flower.ops.folder import Layout, Setup


def setup(**changes):
    usual = {"address": "127.0.0.1:9300", "nodes": [1, 2], "parts": 2, "base_port": 9300}
    return Setup(**usual | changes)


def test_certificates_and_keys(tmp_path, capsys):
    folder = tmp_path / "federation"
    words = ["certs", "--folder", str(folder), "--host", "a.example.org", "--nodes", "2"]
    assert main(["flower", *words]) == 0
    private = [*(folder / "certificates").glob("*.key"), *(folder / "operators").glob("[!.]*[!b]")]
    private += [folder / "keys" / "node-1", folder / "keys" / "node-2"]
    assert len(private) == 5
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
    certificates.make_key(tmp_path / "node-9")
    assert main(["flower", "admit", "--folder", str(folder), str(tmp_path / "node-9.pub")]) == 0
    assert Layout(folder).public_keys() == [folder / "keys" / "node-9.pub"]
    before = (folder / "keys" / "node-9.pub").read_bytes()
    assert main(["flower", "certs", "--folder", str(folder), "--nodes", "9"]) == 0
    assert (folder / "keys" / "node-9.pub").read_bytes() == before
    assert not (folder / "keys" / "node-9").exists()
    (tmp_path / "bad.pub").write_text("ssh-rsa AAAA")
    assert main(["flower", "admit", "--folder", str(folder), str(tmp_path / "bad.pub")]) == 2


@pytest.fixture
def days_later(monkeypatch):
    """Return a function that moves the clock of certificates."""

    def move(days):
        now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        clock = SimpleNamespace(now=lambda zone: now)
        parts = SimpleNamespace(datetime=clock, UTC=datetime.UTC, timedelta=datetime.timedelta)
        monkeypatch.setattr(certificates, "datetime", parts)

    return move


def test_expiry_is_warned_of_30_days_ahead_and_named(tmp_path, capsys, days_later):
    place = Layout(tmp_path)
    credentials.create_missing(place, [], 2)
    day = certificates.last_day(place.certificates / "server.crt")
    place.require_certificates(setup())
    days_later(certificates.DAYS - 31)
    assert place.expiring(link=True) == []
    days_later(certificates.DAYS - 29)
    advice = f"server.crt expires on {day}: renew it with 'simfbo flower certs --renew'."
    assert place.expiring(link=True) == [advice]
    assert place.expiring(link=False) == []  # a node has no server.crt
    assert main(["flower", "certs", "--folder", str(tmp_path), "--nodes", "2"]) == 0
    assert f"Warning: {advice}" in " ".join(capsys.readouterr().out.split())
    days_later(certificates.DAYS + 1)
    with pytest.raises(UserError, match=f"server.crt expired on {day}: renew it"):
        place.require_certificates(setup())
    days_later(certificates.AUTHORITY_DAYS + 1)
    with pytest.raises(UserError, match=r"ca.crt expired on .* and copy ca.crt here"):
        place.require_certificates(setup(link=False))


def test_renewal_replaces_keys_and_keeps_the_authority(tmp_path, capsys, days_later):
    place = Layout(tmp_path)
    credentials.create_missing(place, ["a.example.org"], 2)
    place.setup.write_text(setup(nodes=[1]).model_dump_json())
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert main(["flower", "certs", "--folder", str(tmp_path), "--renew"]) == 0
    operator = operators.own_key(place.operators)
    said = " ".join(capsys.readouterr().out.split())
    assert f"Renewed server.crt, operator {operator.name}, node-1." in said
    changed = {file.name for file, content in before.items() if file.read_bytes() != content}
    pairs = {name + end for name in (operator.name, "node-1") for end in ("", ".pub")}
    assert changed == {"server.crt", "server.key", *pairs}  # node-2 runs elsewhere
    assert "a.example.org" in certificates.names_of(place.certificates / "server.crt")
    assert (place.keys / "node-1.first").read_bytes() == before[place.keys / "node-1.pub"]
    days_later(certificates.AUTHORITY_DAYS - certificates.DAYS + 1)
    old = x509.load_pem_x509_certificate((place.certificates / "ca.crt").read_bytes())
    assert main(["flower", "certs", "--folder", str(tmp_path), "--renew"]) == 0
    assert "ca.crt (copy it to the nodes before" in " ".join(capsys.readouterr().out.split())
    new = x509.load_pem_x509_certificate((place.certificates / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((place.certificates / "server.crt").read_bytes())
    assert new.not_valid_after_utc - old.not_valid_after_utc > datetime.timedelta(days=1000)
    for authority in (old, new):  # whoever has either trusts the server
        server.verify_directly_issued_by(authority)


def test_operators_are_added_listed_and_revoked(tmp_path, capsys):
    certificates.make_key(tmp_path / "berta")

    def said(*words):
        code = main(["flower", "operators", *words, "--folder", str(tmp_path / "f")])
        out, error = capsys.readouterr()
        return code, " ".join((out + error).split())

    assert said("list") == (0, "no operators")
    assert said("add", "anna")[0] == said("add", str(tmp_path / "berta.pub"))[0] == 0
    text = said("list")[1]
    fingerprint = certificates.fingerprint(certificates.public_key(tmp_path / "berta.pub"))
    assert f"berta {fingerprint} elsewhere" in text
    assert "anna SHA256:" in text
    assert stat.S_IMODE((tmp_path / "f/operators/anna").stat().st_mode) == 0o600
    for words, sentence in [
        (["add", "anna"], "There is an operator 'anna' already: revoke it first."),
        (["add", "../anna"], "'../anna' is not a name"),
        (["add", str(tmp_path / "none.pub")], "none.pub is not a public key"),
        (["add"], "Name the operator: simfbo flower operators add NAME."),
        (["revoke", "carla"], "no operator 'carla'"),
        (["revoke", "../f"], "no operator '../f'"),
    ]:
        assert said(*words)[0] == 2
        assert sentence in said(*words)[1]
    assert said("revoke", "anna") == (0, "Revoked anna, also for a SuperLink that is running.")
    assert [file.name for file in (tmp_path / "f/operators").iterdir()] == ["berta.pub"]


def test_the_key_to_sign_with(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="create one with 'simfbo flower operators add NAME'"):
        operators.own_key(tmp_path)
    operators.add(tmp_path, "anna")
    operators.add(tmp_path, "zoe")
    assert operators.own_key(tmp_path).name == "anna"
    monkeypatch.setattr(operators.getpass, "getuser", lambda: "zoe")
    assert operators.own_key(tmp_path).name == "zoe"
    monkeypatch.setenv(operators.KEY, str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match="which is not a file"):
        operators.own_key(tmp_path)
    certificates.make_key(tmp_path / "elsewhere")
    assert operators.own_key(tmp_path).name == "elsewhere"
