"""`simfbo flower` without Flower: certificates, what is started, and what is said of mistakes."""

import datetime
import itertools
import json
import os
import re
import socket
import ssl
import stat
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

import simfbo
from simfbo import UserError
from simfbo.cli.main import main as cli
from simfbo.flower.deployment import clients_of
from simfbo.flower.ops import certificates, training
from simfbo.flower.ops import control as command
from simfbo.flower.ops import fast_nodes as fast
from simfbo.flower.ops import folder as layout
from simfbo.flower.ops.folder import Layout, Setup


def setup(**changes):
    usual = {"address": "127.0.0.1:9300", "nodes": [1, 2], "parts": 2, "base_port": 9300}
    return Setup(**usual | changes)


def said(capsys, *words):
    """Return exit code and sentence of a command."""
    code = cli.main(["flower", *map(str, words)])
    return code, capsys.readouterr().err


def test_certificates_and_keys(tmp_path, capsys):
    folder = tmp_path / "federation"
    code = cli.main(
        ["flower", "certs", "--folder", str(folder), "--host", "a.example.org", "--nodes", "2"]
    )
    assert code == 0
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
        assert cli.main(["flower", "certs", "--folder", str(folder), *flags]) == 0
    out = capsys.readouterr().out
    assert "Made: node-3." in out
    assert "server.crt for b.example.org, a.example.org" in out
    after = {file.name: file.read_bytes() for file in (folder / "keys").iterdir()}
    assert {name: after[name] for name in before} == before
    assert (folder / "certificates/ca.crt").read_bytes() == authority
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "superlink.db").touch()
    assert cli.main(["flower", "certs", "--folder", str(folder), "--nodes", "2", "--new"]) == 0
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


def test_processes_use_tls_node_keys_and_a_secret(tmp_path):
    found = dict(layout.processes(Layout(tmp_path), setup()))
    assert list(found) == [
        "superlink", "superexec", "node-1", "node-1-exec", "node-2", "node-2-exec"
    ]  # fmt: skip
    assert "--enable-supernode-auth" in found["superlink"]
    assert "--insecure" not in [*found["superlink"], *found["superexec"], *found["node-1"]]
    assert str(tmp_path / "keys" / "node-2") in found["node-2"]
    assert "partition-id=1 num-partitions=2" in found["node-2"]
    assert all("--superexec-auth-secret-file" in words for words in found.values())
    assert found["node-1"][1:4] == ["-m", "simfbo.flower.ops.fast_nodes", "supernode"]
    stock = dict(layout.processes(Layout(tmp_path), setup(stock=True, insecure=True)))
    assert stock["node-1"][0] == "flower-supernode"
    assert "--insecure" in stock["superlink"]
    joined = dict(layout.processes(Layout(tmp_path), setup(link=False, nodes=[2])))
    assert list(joined) == ["node-2", "node-2-exec"]


def test_two_files_import_flower_and_simulation_does_not():
    source = Path(simfbo.__file__).parent
    importing = re.compile(r"^\s*(from|import) flwr", re.MULTILINE)
    found = {str(f.relative_to(source)) for f in source.rglob("*.py")
             if importing.search(f.read_text())}  # fmt: skip
    assert found == {"engines/flower.py", "deploy/fast.py"}
    code = "import sys, simfbo.cli.main, simfbo.flower.deployment, simfbo.config.build; print('flwr' in sys.modules)"
    words = [sys.executable, "-c", code]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "False\n"


def test_flower_is_told_to_send_nothing_home_and_install_nothing(tmp_path):
    found = layout.environment(Layout(tmp_path))
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert found["FLWR_HOME"] == str(tmp_path / "flwr")
    assert "FLWR_SUPEREXEC_TASK_POLL_INTERVAL" in layout.environment(Layout(tmp_path), "node-1")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "Say what to do: certs, up, admit, run, status or down"),
        (["status"], "There is no federation in"),
        (["run", "nowhere"], "There is no federation in"),
        (["admit", "x.pub"], "x.pub is no public key"),
        (["up", "--nodes", "3", "--parts", "2"], "3 nodes cannot share 2 parts: raise --parts."),
        (["up", "--folder", "/dev/null"], "/dev/null cannot be a federation's folder"),
        (["certs", "--folder", "/dev/null/x"], "cannot be a federation's folder"),
        (["certs", "--host", 70 * "a"], "is no host name or address"),
        (["up", "--join", "nonsense"], "'nonsense' is no address: write host:port"),
        (["up", "--join", "h:99999"], "'h:99999' is no address"),
        (["up", "--join", "h:93"], "say which node of how many this is: --node 2 --parts 3"),
        (["up", "--join", "h:93", "--node", "3", "--parts", "2"], "say which node of how many"),
        (["up", "--join", "127.0.0.1:1", "--node", "1", "--parts", "1"], "ca.crt is missing"),
        (["up", "--nodes", "-1"], "'-1' is not between 0 and 1000"),
        (["certs", "--nodes", "0"], "'0' is not between 1 and 1000"),
        (["up", "--port", "70000"], "'70000' is not between 1024 and 64000"),
        (["up", "--node-config", "no settings"], "Write --node-config as"),
        (["certs", "--host", "two words"], "'two words' is no host name or address"),
    ],
)
def test_mistakes_end_in_a_sentence(tmp_path, capsys, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    code, text = said(capsys, *words)
    assert code == 2
    assert sentence in text
    assert "Traceback" not in text


def test_admit_keeps_a_key_before_anything_is_up(tmp_path, capsys):
    folder = tmp_path / "federation"
    certificates.make_node_key(tmp_path / "node-9")
    assert cli.main(["flower", "admit", "--folder", str(folder), str(tmp_path / "node-9.pub")]) == 0
    assert Layout(folder).public_keys() == [folder / "keys" / "node-9.pub"]
    before = (folder / "keys" / "node-9.pub").read_bytes()
    assert cli.main(["flower", "certs", "--folder", str(folder), "--nodes", "9"]) == 0
    assert (folder / "keys" / "node-9.pub").read_bytes() == before
    assert not (folder / "keys" / "node-9").exists()
    (tmp_path / "bad.pub").write_text("ssh-rsa AAAA")
    assert cli.main(["flower", "admit", "--folder", str(folder), str(tmp_path / "bad.pub")]) == 2


def test_runs_are_started_where_the_superlink_is(tmp_path, capsys):
    Layout(tmp_path).setup.write_text(setup(link=False).model_dump_json())
    code, text = said(capsys, "run", "--folder", tmp_path, tmp_path)
    assert code == 2
    assert "The SuperLink is on another machine: start runs there." in text


def test_down_without_a_federation_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("federation", "/dev/null"):
        assert cli.main(["flower", "down", "--folder", folder]) == 0
        assert "Nothing was running" in capsys.readouterr().out


def test_a_port_that_is_taken(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = said(
            capsys, "up", "--folder", tmp_path / "f", "--nodes", 0, "--insecure", "--port", port
        )
    assert code == 2
    assert f"Port {port} is taken" in text


def test_an_expired_certificate(tmp_path, monkeypatch):
    place = Layout(tmp_path)
    command.make_missing(place, [], 2)
    place.require_certificates(setup())
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=400)
    clock = SimpleNamespace(now=lambda zone: later)
    monkeypatch.setattr(certificates, "datetime", SimpleNamespace(datetime=clock, UTC=datetime.UTC))
    with pytest.raises(UserError, match="has expired"):
        place.require_certificates(setup())


def test_a_state_left_behind_does_not_count_as_running(tmp_path):
    place = Layout(tmp_path)
    place.state.write_text(json.dumps({"supervisor": os.getpid(), "processes": {}}))
    assert command.running(place) is None  # this test has that number, and is no supervisor
    place.state.write_text("{")
    assert command.running(place) is None


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        ({}, "must say which clients it holds"),
        ({"partition-id": 2, "num-partitions": 2}, "must say which clients it holds"),
        ({"clients": "a-b"}, "must be written as 0-9,12"),
        ({"clients": "3-1"}, "holds the clients none of 10"),
        ({"clients": "8-12"}, "give it some of the numbers 0 to 9"),
        ({"clients": "1,1"}, "each once and in order"),
    ],
)
def test_clients_that_a_node_cannot_hold(node, sentence):
    with pytest.raises(UserError, match=sentence):
        clients_of(node, 10)


def test_parts_cover_all_clients_once():
    for parts in (1, 3, 7):
        held = [clients_of({"partition-id": k, "num-partitions": parts}, 10) for k in range(parts)]
        assert [*itertools.chain(*held)] == list(range(10))


def test_a_growing_history_is_read_line_by_line(tmp_path):
    file = tmp_path / "history.jsonl"
    book = training._Book(file)
    assert book.news() == []
    file.write_text('{"kind": "header", "rounds": 3}\n{"kind": "rec')
    assert [line["kind"] for line in book.news()] == ["header"]
    with open(file, "a") as out:
        out.write('ord", "round": 0}\n{"kind": "end", "status": "finished"}\n')
    assert [line["kind"] for line in book.news()] == ["record", "end"]
    assert training._end(tmp_path) == {"kind": "end", "status": "finished"}
    file.write_text('{"kind": "header", "rounds": 3}\n')  # resumed: cut, and longer again
    assert book.news() == []
    file.write_text('{"kind": "header", "rounds": 3}\n' + '{"kind": "record", "round": 1}\n' * 9)
    assert all(line["kind"] == "record" for line in book.news())
    assert training._end(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[tool]\n", "[tool.flwr.app.config]\nrounds = 3\n"])
def test_an_app_must_be_one(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UserError, match=r"is no Flower app|must have folder"):
        training._checked_app(tmp_path)


@pytest.mark.parametrize(
    ("texts", "settings"),
    [
        (["rounds=7", "rate=1", "name=it's", "fast=true"],
         {"rounds": 7, "rate": 1.0, "name": "it's", "fast": True}),
        (['name="a b"', "rate=1e-3"], {"name": "a b", "rate": 1e-3}),
        (["name=3"], {"name": "3"}),
        (["round=7"], "'round=7' sets nothing: write KEY=VALUE, KEY one of fast, name"),
        (["rounds"], "'rounds' sets nothing"),
        (["folder=x"], "'folder=x' sets nothing"),
        (["rounds=many"], "'rounds' must be like 3, got 'many'"),
        (["rounds=1.5"], "'rounds' must be like 3, got '1.5'"),
        (["fast=1"], "'fast' must be like False, got '1'"),
    ],
)  # fmt: skip
def test_settings_of_a_run(tmp_path, texts, settings):
    config = {"rounds": 3, "rate": 0.5, "name": "n", "fast": False, "folder": ""}
    options = SimpleNamespace(set=texts, resume=None)
    if isinstance(settings, str):
        with pytest.raises(UserError, match=settings):
            training._settings(options, config, tmp_path)
    else:
        found = training._settings(options, config, tmp_path)
        assert found == settings
        assert tomllib.loads(training._toml(found)) == settings


def test_a_resumed_run_has_the_settings_it_was_begun_with(tmp_path):
    header = {"kind": "header", "config": {"rounds": 9, "gone": 1}}
    (tmp_path / "history.jsonl").write_text(json.dumps(header) + "\n")
    options = SimpleNamespace(set=["rate=2"], resume=tmp_path)
    found = training._settings(options, {"rounds": 3, "rate": 0.5, "folder": ""}, tmp_path)
    assert found == {"rounds": 9, "rate": 2.0}


def test_a_node_sleeps_a_tenth_of_the_time_since_its_last_message(monkeypatch):
    now, slept = [0.0], []
    monkeypatch.setattr(fast.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(fast.time, "sleep", slept.append)
    rhythm = fast.Rhythm()
    for now[0], asked in ((0.1, 3), (10.0, 3), (100.0, 3), (101.0, 0.5), (101.1, 3)):
        rhythm.sleep(asked)
    assert slept == pytest.approx([0.05, 1.0, 3.0, 0.05, 0.05])


def test_a_part_of_flower_that_is_gone_is_named():
    with pytest.raises(SystemExit, match="use 'simfbo flower up --stock'"):
        fast._replace(fast.run_clientapp, "no_such_thing", None)
