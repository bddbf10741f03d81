"""A federation to measure: started, disturbed and ended by the commands that users have."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
APP = HERE / "app"
SIMFBO = [sys.executable, "-m", "simfbo.cli.main", "flower"]


def simfbo(folder, *words, seconds=180, check=True):
    """Return what `simfbo flower` says."""
    command, options = words[0], words[1:]
    return subprocess.run(
        [*SIMFBO, command, "--folder", str(folder), *map(str, options)],
        capture_output=True, text=True, timeout=seconds, check=check, cwd=folder.parent,
    )  # fmt: skip


@contextmanager
def federation(nodes=3, port=9400, stock=False):
    """Start a federation of nodes that can be disturbed; end it afterwards."""
    root = Path(tempfile.mkdtemp(prefix="simfbo-flower-"))
    (root / "faults").mkdir()
    folder = root / "federation"
    config = f"faults='{root / 'faults'}'"
    flags = ["--stock"] if stock else []
    try:
        simfbo(folder, "up", "--nodes", nodes, "--port", port, "--node-config", config, *flags)
        yield folder
    finally:
        simfbo(folder, "down", check=False)
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def run(folder, name, **settings):
    """Start a run and give its folder; wait for its end afterwards."""
    output = folder.parent / name
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    flags = [part for word in words for part in ("--set", word)]
    job = subprocess.Popen(
        [*SIMFBO, "run", "--folder", str(folder), str(APP), "--output", str(output), *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield output
        said, _ = job.communicate(timeout=400)
        if job.returncode:
            print(said, flush=True)
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGINT)
            job.wait(timeout=30)


def lines(output):
    """Return the history of a run, as far as it is written."""
    file = output / "history.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def wait_for_round(output, number, seconds=150):
    """Wait until a run has reached a round."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if any(line.get("kind") == "record" and line["round"] >= number for line in lines(output)):
            return
        time.sleep(0.1)
    raise TimeoutError(f"round {number} was not reached: {lines(output)[-3:]}")


def pid(folder, process):
    """Return the number of one of a federation's processes."""
    return json.loads((folder / "state.json").read_text())["processes"][process]["pid"]


def server_app(folder):
    """Return the number of the server's process of the run that is going on."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"flwr-serverapp" in entry.read_bytes():
                home = f"FLWR_HOME={folder / 'flwr'}".encode()
                if home in (entry.parent / "environ").read_bytes():
                    return int(entry.parent.name)
        except OSError:
            continue
    raise LookupError("no server process")


def exchanges(output):
    """Return the seconds that each exchange took, by part, as the server wrote them down."""
    found = []
    for line in (output / "server.log").read_text().splitlines():
        if line.startswith("round ") and "send" in line:
            parts = line.partition("exchange: ")[2].split(", ")
            found.append({name: float(took) for name, took, _ in map(str.split, parts)})
    return found


class CountingProxy:
    """Passes TCP connections on and counts the bytes each way; TLS goes through untouched."""

    def __init__(self, port, target):
        self.up = self.down = 0
        self._target, self._listener = target, socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            for source, sink, way in ((client, server, "up"), (server, client, "down")):
                threading.Thread(target=self._pass, args=(source, sink, way), daemon=True).start()

    def _pass(self, source, sink, way):
        try:
            while data := source.recv(65536):
                setattr(self, way, getattr(self, way) + len(data))
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            end.close()

    def close(self):
        """Take no more connections."""
        self._listener.close()


def environment():
    """Return this machine's facts, for the results."""
    import flwr
    import jax

    return {
        "python": sys.version.split()[0],
        "flwr": flwr.__version__,
        "jax": jax.__version__,
        "cores": os.cpu_count(),
    }
