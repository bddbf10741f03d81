"""`simfbo flower` without starting Flower: what is started, and wrong input."""

import importlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import simfbo
from simfbo import UserError
from simfbo.cli.main import main
from simfbo.flower.deployment import clients_of
from simfbo.flower.ops import control, fast_nodes, supervisor
from simfbo.flower.ops import folder as layout
from simfbo.flower.ops.folder import Layout, Setup


def setup(**changes):
    usual = {"address": "127.0.0.1:9300", "nodes": [1, 2], "parts": 2, "base_port": 9300}
    return Setup(**usual | changes)


def said(capsys, *words):
    """Return the exit code and the error of a command."""
    code = main(["flower", *map(str, words)])
    return code, capsys.readouterr().err


def test_processes_use_tls_node_keys_and_a_secret(tmp_path):
    found = dict(layout.processes(Layout(tmp_path), setup()))
    assert list(found) == [
        "superlink", "superexec", "node-1", "node-1-exec", "node-2", "node-2-exec"
    ]  # fmt: skip
    assert "--enable-supernode-auth" in found["superlink"]
    assert "--insecure" not in [*found["superlink"], *found["superexec"], *found["node-1"]]
    assert str(tmp_path / "keys" / "node-2") in found["node-2"]
    (settings,) = (word for word in found["node-2"] if word.startswith("partition-id=1 "))
    assert settings.split() == [
        "partition-id=1", "num-partitions=2", f"memory='{tmp_path / 'memory' / 'node-2'}'"
    ]  # fmt: skip
    assert all("--superexec-auth-secret-file" in words for words in found.values())
    assert found["node-1"][1:4] == ["-m", "simfbo.flower.ops.fast_nodes", "supernode"]
    stock = dict(layout.processes(Layout(tmp_path), setup(stock=True, insecure=True)))
    assert stock["node-1"][0] == "flower-supernode"
    assert "--insecure" in stock["superlink"]
    for words in (found["superlink"], stock["superlink"]):  # never Flower's own, which is open
        assert words[1:4] == ["-m", "simfbo.flower.ops.superlink", str(tmp_path)]
    listed = dict(layout.processes(Layout(tmp_path), setup(only_apps=["a" * 64, "b" * 64])))
    assert listed["node-2"][4:6] == ["--only-apps", f"{'a' * 64},{'b' * 64}"]
    joined = dict(layout.processes(Layout(tmp_path), setup(link=False, nodes=[2])))
    assert list(joined) == ["node-2", "node-2-exec"]


def test_down_beside_a_process_whose_command_is_not_utf8(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "input()", b"\xff"], stdin=subprocess.PIPE)
    try:
        assert not control.down(tmp_path)
    finally:
        other.kill()
        other.communicate()


def test_a_folder_whose_name_is_not_utf8(tmp_path, capsys, monkeypatch):
    folder = tmp_path / os.fsdecode(b"\xff")
    assert not control.down(folder)
    code, err = said(capsys, "new", folder / "app")
    assert (code, err.count("\n")) == (2, 1)
    assert "UTF-8" in err
    assert not folder.exists()


def test_few_files_import_flower_and_simulation_does_not():
    source = Path(simfbo.__file__).parent
    importing = re.compile(r"^\s*(from|import) flwr", re.MULTILINE)
    found = {str(f.relative_to(source)) for f in source.rglob("*.py")
             if importing.search(f.read_text())}  # fmt: skip
    ops = {f"flower/ops/{name}.py" for name in ("control_api", "fast_nodes", "superlink")}
    assert found == {"flower/app.py", "flower/bounded.py", *ops}
    modules = "simfbo.cli.main, simfbo.flower.deployment, simfbo.config.build"
    code = f"import sys, {modules}; print('flwr' in sys.modules)"
    words = [sys.executable, "-c", code]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "False\n"


def test_without_the_extra_everything_ends_in_one_sentence(capsys, monkeypatch):
    sentence = "This needs Flower, which is not installed: pip install 'simfbo[flower]'."
    for name in ("app", "ops.control", "ops.follow"):
        importlib.import_module(f"simfbo.flower.{name}")
    for name in [name for name in sys.modules if re.match(r"simfbo\.flower\.(app|ops\.)", name)]:
        ours = sys.modules[name]
        package, _, last = ours.__name__.rpartition(".")
        monkeypatch.delattr(sys.modules[package], last)
        monkeypatch.delitem(sys.modules, ours.__name__)
    for missing in ("flwr.app", "cryptography"):
        monkeypatch.setitem(sys.modules, missing, None)
    assert said(capsys, "down") == (2, f"simfbo: {sentence}\n")
    assert said(capsys, "run", "app") == (2, f"simfbo: {sentence}\n")
    with pytest.raises(UserError, match=re.escape(sentence)):
        importlib.import_module("simfbo.flower.app")


def test_flower_sends_no_telemetry_and_installs_nothing(tmp_path):
    found = layout.environment(Layout(tmp_path))
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert found["FLWR_INTERNAL_GRPC_CONTROL_API"] == found["FLWR_INTERNAL_GRPC_FLEET_API"] == "0"
    assert found["FLWR_HOME"] == str(tmp_path / "flwr")
    assert "FLWR_SUPEREXEC_TASK_POLL_INTERVAL" in layout.environment(Layout(tmp_path), "node-1")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "Name a command: new, certs, up, admit, operators, digest, run, status or down"),
        (["status"], "No federation in"),
        (["run", "nowhere"], "No federation in"),
        (["run", "nowhere", "--set", "rounds"], "--set takes KEY=VALUE, got 'rounds'."),
        (["admit", "x.pub"], "x.pub is not a public key"),
        (["up", "--nodes", "3", "--parts", "2"], "3 nodes cannot share 2 parts: raise --parts."),
        (["up", "--folder", "/dev/null"], "Cannot use /dev/null as a folder"),
        (["certs", "--folder", "/dev/null/x"], "Cannot use /dev/null/x as a folder"),
        (["certs", "--host", 70 * "a"], "is not a host name or address"),
        (["up", "--join", "nonsense"], "'nonsense' is not an address: write host:port"),
        (["up", "--join", "h:99999"], "'h:99999' is not an address"),
        (["up", "--join", "h:93"], "--join needs the number of this node and of all nodes"),
        (["up", "--join", "h:93", "--node", "3", "--parts", "2"], "such as --node 2 --parts 3."),
        (["up", "--join", "127.0.0.1:1", "--node", "1", "--parts", "1"], "ca.crt is missing"),
        (["up", "--nodes", "-1"], "'-1' is not between 0 and 1000"),
        (["certs", "--nodes", "0"], "'0' is not between 1 and 1000"),
        (["up", "--port", "70000"], "'70000' is not between 1024 and 64000"),
        (["up", "--node-config", "no settings"], "Write --node-config as"),
        (["certs", "--host", "two words"], "'two words' is not a host name or address"),
        (["certs", "--renew"], "has nothing to renew"),
        (["digest", "nowhere"], "nowhere is not a Flower app"),
        (["up", "--insecure", "--host", "a.example.org"], "--insecure works on this machine only"),
        (
            ["up", "--insecure", "--join", "a.example.org:9300", "--node", "1", "--parts", "1"],
            "--insecure works on this machine only",
        ),
        (["up", "--only-apps", "abc"], "as 'simfbo flower digest APP' prints them"),
        (["up", "--stock", "--only-apps", "a" * 64], "omit --stock or --only-apps"),
    ],
)
def test_mistakes_end_in_a_sentence(tmp_path, capsys, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    code, text = said(capsys, *words)
    assert code == 2
    assert sentence in text
    assert "Traceback" not in text


def test_down_without_a_federation_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("federation", "/dev/null"):
        assert main(["flower", "down", "--folder", folder]) == 0
        assert "Nothing is running in" in capsys.readouterr().out


def test_a_port_that_is_taken(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = said(
            capsys, "up", "--folder", tmp_path / "f", "--nodes", 0, "--insecure", "--port", port
        )
    assert code == 2
    assert f"Port {port} is in use" in text


def test_a_state_left_behind_does_not_count_as_running(tmp_path):
    place = Layout(tmp_path)
    place.state.write_text(json.dumps({"supervisor": os.getpid(), "processes": {}}))
    assert supervisor.running(place) is None  # its number belongs to this test
    place.state.write_text("{")
    assert supervisor.running(place) is None


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        ({}, "must list its clients"),
        ({"partition-id": 2, "num-partitions": 2}, "must list its clients"),
        ({"clients": "a-b"}, "must be a list such as 0-9,12"),
        ({"clients": "3-1"}, "has the clients none of 10"),
        ({"clients": "8-12"}, "list numbers from 0 to 9"),
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


def test_status_shows_processes_nodes_runs_and_what_listens(tmp_path, capsys, monkeypatch):
    found = control.Status(
        {"superlink": {"pid": 12, "starts": 1}, "node-1": {"pid": None, "starts": 3}},
        [{"node-id": 77, "key": "node-1", "status": "online"}],
        [],
        control.listening(Layout(tmp_path), setup(host="0.0.0.0")),
        ["server.crt expires soon."],
    )
    monkeypatch.setattr(control, "status", lambda folder: found)
    assert main(["flower", "status"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"superlink +12 +1 *\n", out)
    assert re.search(r"node-1 +restarting +3 *\n", out)
    assert re.search(r"77 +node-1 +online *\n", out)
    assert "no runs\n" in out
    assert re.search(r"0\.0\.0\.0:9300 +TLS +nodes +one of 0 node keys", out)
    assert re.search(r"127\.0\.0\.1:9300 +TLS +operators +an operator's key \(nobody\)", out)
    assert re.search(r"127\.0\.0\.1:9302 +no TLS +node-2's app +the secret of this folder", out)
    assert "Warning: server.crt expires soon." in out
    assert main(["flower", "status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["up"], told["processes"]["superlink"]["pid"], told["runs"]) == (True, 12, [])
    monkeypatch.setattr(control, "status", lambda folder: None)
    assert main(["flower", "status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"up": False}


def test_a_process_that_ends_is_restarted_with_a_growing_delay(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    Layout(tmp_path).logs.mkdir()
    child = supervisor._Child(
        Layout(tmp_path), layout.Process("node-1", [sys.executable, "-c", ""])
    )
    assert child.poll()
    for delay in (1.0, 2.0, 4.0, 8.0, 8.0):
        child.running.wait(60)
        assert child.poll()  # it ended
        assert child.describe()["pid"] is None
        now[0] += delay - 0.01
        assert not child.poll()
        now[0] += 0.01
        assert child.poll()  # it was restarted
    assert child.describe() == {"pid": child.running.pid, "starts": 6}
    child.running.wait(60)
    now[0] += 21.0  # it lasted
    assert child.poll()
    now[0] += 0.5
    assert child.poll()
    child.running.wait(60)


def test_a_node_sleeps_a_tenth_of_the_time_since_its_last_message(monkeypatch):
    now, slept = [0.0], []
    monkeypatch.setattr(fast_nodes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(fast_nodes.time, "sleep", slept.append)
    pacer = fast_nodes.Pacer()
    for now[0], asked in ((0.1, 3), (10.0, 3), (100.0, 3), (101.0, 0.5), (101.1, 3)):
        pacer.sleep(asked)
    assert slept == pytest.approx([0.05, 1.0, 3.0, 0.05, 0.05])


def test_a_part_of_flower_that_is_gone_is_named():
    with pytest.raises(SystemExit, match="install the one that simfbo was tested with"):
        fast_nodes.replace(fast_nodes.run_clientapp, "no_such_thing", None)
