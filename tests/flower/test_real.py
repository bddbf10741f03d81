"""Real federations: a SuperLink, SuperExecs and SuperNodes, with TLS and node keys."""

import json
import runpy
import shutil
import socket
import ssl
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import httpx
import numpy as np
import pytest

from simfbo.cli.main import main
from simfbo.estimators import FederatedLogistic
from simfbo.flower import simulate
from simfbo.runs import checkpoint

ROOT = Path(__file__).parent.parent.parent
SIMFBO = [sys.executable, "-m", "simfbo.cli.main", "flower"]
LONG = 600  # seconds after which a test gives up, however busy the machine is
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"
)

FAULT = '''

from pathlib import Path


@app.lifespan()
def fails_once(context):
    """Raise in the second round, on the second node."""
    flag = Path(str(context.node_config["flag"]))
    if context.node_config["partition-id"] == 1 and flag.exists():
        flag.unlink()
        raise RuntimeError("broken on purpose")
    yield
'''


def flower(folder, command, *words):
    """Run one of the commands of `simfbo flower`."""
    return subprocess.run(
        [*SIMFBO, command, "--folder", str(folder), *map(str, words)],
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=LONG,
    )


def free_ports(count):
    """Return the first of some ports in a row that are free."""
    for port in range(21_000, 60_000, 50):
        try:
            for offset in range(count):
                socket.create_server(("127.0.0.1", port + offset)).close()
        except OSError:
            continue
        return port
    raise OSError("no free ports")


def processes_of(folder):
    """Return the commands of all processes that belong to a federation."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"FLWR_HOME={folder / 'flwr'}".encode() in entry.read_bytes():
                found.append((entry.parent / "cmdline").read_text())
        except OSError:
            continue
    return found


def lines_of(run):
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


@pytest.fixture
def app(tmp_path):
    """Return a copy of the example's app, to be changed."""
    return Path(shutil.copytree(ROOT / "examples" / "flower_app", tmp_path / "app"))


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a federation, which is stopped at the end."""
    yield tmp_path / "federation"
    flower(tmp_path / "federation", "down")


def test_a_new_app_on_a_federation_from_up_to_down(
    folder, tmp_path, single_precision, capsys, monkeypatch
):
    app = tmp_path / "demo"
    assert main(["flower", "new", str(app), "--losses"]) == 0
    up = flower(folder, "up", "--nodes", 1, "--port", free_ports(3))
    assert up.returncode == 0, up.stderr
    assert "1 node here, with TLS and node keys" in up.stdout
    assert "operators an operator's key (" in " ".join(up.stdout.split())
    assert any("--enable-supernode-auth" in command for command in processes_of(folder))
    output = folder.parent / "run"
    run = flower(folder, "run", app, "--set", "rounds=3", "--output", output)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"Finished. History and checkpoints are in {output}" in run.stdout
    lines = lines_of(output)
    assert [line["kind"] for line in lines] == ["header", *["record"] * 4, "verdict", "end"]
    assert lines[-1]["status"] == "finished"
    _require_simulated(app, output, monkeypatch)
    _no_one_else_gets_in(folder, capsys)
    assert flower(folder, "down").stdout == "Down.\n"
    assert processes_of(folder) == []


def _require_simulated(app, output, monkeypatch):
    """Compare the end of a run of three rounds with the app's simulation."""
    monkeypatch.syspath_prepend(str(app))
    config = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    plan = runpy.run_path(str(app / "task.py"))["deployment"]({**config, "rounds": 3})
    wanted = simulate(plan).state
    found = checkpoint.newest(output, lambda one: one.arrays)
    assert float(abs(wanted.y["weight"]).max()) > 0.1
    assert found[".y['weight']"] == pytest.approx(np.asarray(wanted.y["weight"]), rel=1e-5)
    assert found[".x"] == pytest.approx(np.asarray(wanted.x), rel=1e-5)


def _no_one_else_gets_in(folder, capsys):
    """Ask for the runs without an operator's key, and after the operator was revoked."""
    address = json.loads((folder / "setup.json").read_text())["address"]
    trust = ssl.create_default_context(cafile=str(folder / "certificates" / "ca.crt"))
    headers = {"content-type": "application/protobuf"}
    answer = httpx.post(f"https://{address}/v1/control/list-runs", verify=trust, headers=headers)
    assert answer.status_code == 401
    assert "Only operators may do this" in answer.json()["detail"]
    where = ["--folder", str(folder)]
    assert main(["flower", "certs", "--renew", *where]) == 0
    assert main(["flower", "status", *where]) == 0
    assert "finished:completed" in capsys.readouterr().out
    (public,) = (folder / "operators").glob("*.pub")
    assert main(["flower", "operators", "revoke", public.stem, *where]) == 0
    assert main(["flower", "status", *where]) == 2
    assert "No operator's private key is in" in capsys.readouterr().err


@pytest.mark.slow
def test_three_commands_from_an_empty_folder(folder):
    """Train a new app's estimator on three nodes, and load its model."""
    app, output = folder.parent / "demo", folder.parent / "demo-run"
    assert main(["flower", "new", str(app)]) == 0
    up = flower(folder, "up", "--nodes", 3, "--port", free_ports(5))
    assert up.returncode == 0, up.stderr
    run = flower(folder, "run", app, "--set", "rounds=3", "--output", output)
    assert run.returncode == 0, run.stdout + run.stderr
    model = FederatedLogistic().load(output, classes=["no", "yes"])
    assert model.coef_[0, 0] > 0 > model.coef_[0, 2]
    assert model.score_clients_.missing == []
    assert 0.5 < model.score_clients_.mean("accuracy") <= 1
    assert flower(folder, "down").stdout == "Down.\n"


@pytest.mark.slow
def test_the_example_with_a_client_that_fails(folder, app):
    with open(app / "client_app.py", "a") as file:
        file.write(FAULT)
    task = app / "task.py"
    task.write_text(task.read_text().replace("every=5", "every=1"))
    flag, output = folder.parent / "flag", folder.parent / "run"
    settings = ["--node-config", f"flag='{flag}'"]
    up = flower(folder, "up", "--nodes", 2, "--port", free_ports(4), *settings)
    assert up.returncode == 0, up.stderr
    words = ["run", "--folder", folder, app, "--set", "rounds=3", "--set", "cohort=10"]
    job = subprocess.Popen(
        [*SIMFBO, *map(str, words), "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    begin, history = time.monotonic(), output / "history.jsonl"
    while not (history.exists() and '"round": 1,' in history.read_text()):
        assert job.poll() is None, job.stdout.read()
        assert time.monotonic() - begin < LONG
        time.sleep(0.1)
    flag.touch()
    said, _ = job.communicate(timeout=LONG)
    assert job.returncode == 0, said
    status = flower(folder, "status")
    assert "node-2-exec" in status.stdout
    assert status.stdout.count(" online ") == 2
    assert flower(folder, "down").stdout == "Down.\n"
    assert processes_of(folder) == []
    lines = lines_of(output)
    assert lines[-1]["status"] == "finished"
    refusals = [line for line in lines if line["kind"] == "refusal"]
    assert [line["client"] for line in refusals] == [5, 6, 7, 8, 9]
    assert len({line["round"] for line in refusals}) == 1
    assert all("broken on purpose" in line["text"] for line in refusals)
    assert "client 5 did not reply: its app failed with" in said
    records = [line for line in lines if line["kind"] == "record"]
    assert records[-1]["test_accuracy"] > records[0]["test_accuracy"]
    assert records[-1]["clients_mean_upper_loss"] < records[0]["clients_mean_upper_loss"]
