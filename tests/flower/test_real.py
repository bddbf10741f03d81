"""One real federation: SuperLink, SuperExec and two SuperNodes, with TLS and node keys."""

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
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


def flower(folder, *words, seconds):
    command = [sys.executable, "-m", "simfbo.cli.main", "flower", words[0], "--folder", folder]
    return subprocess.run(
        [*map(str, command), *map(str, words[1:])],
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=seconds,
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


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks at /proc")
def test_a_federation_from_up_to_down_with_a_client_that_fails(tmp_path):
    folder, app, flag = tmp_path / "federation", tmp_path / "app", tmp_path / "flag"
    shutil.copytree(ROOT / "examples" / "flower_app", app)
    with open(app / "client_app.py", "a") as file:
        file.write(FAULT)
    begin = time.monotonic()
    try:
        settings = f"flag='{flag}'"
        up = flower(folder, "up", "--nodes", 2, "--port", free_ports(4), "--node-config", settings,
                    seconds=60)  # fmt: skip
        assert up.returncode == 0, up.stderr
        assert "2 nodes here, TLS and node keys on" in up.stdout
        flags = ["--set", "rounds=3", "--set", "cohort=10", "--output", tmp_path / "run"]
        job = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "simfbo.cli.main",
                "flower",
                "run",
                "--folder",
                folder,
                app,
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        book = tmp_path / "run" / "history.jsonl"
        while not (book.exists() and '"round": 1,' in book.read_text()):
            assert job.poll() is None, job.stdout.read()
            assert time.monotonic() - begin < 80
            time.sleep(0.1)
        flag.touch()
        said, _ = job.communicate(timeout=max(1, 90 - (time.monotonic() - begin)))
    finally:
        down = flower(folder, "down", seconds=30)
    assert down.stdout == "Down.\n"
    assert processes_of(folder) == []
    assert job.returncode == 0, said
    lines = [json.loads(line) for line in book.read_text().splitlines()]
    assert lines[-1] == {"kind": "end", "status": "finished"}
    refusals = [line for line in lines if line["kind"] == "refusal"]
    assert [line["client"] for line in refusals] == [5, 6, 7, 8, 9]
    assert len({line["round"] for line in refusals}) == 1
    assert all("broken on purpose" in line["reason"] for line in refusals)
    assert "client 5 did not reply: its app failed with" in said
    assert lines[-2]["test_accuracy"] > lines[1]["test_accuracy"]
