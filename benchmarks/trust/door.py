"""Twelve attacks of a stranger on a real federation, before and after there was a door.

    python benchmarks/trust/door.py                  # results/door.json, and a table

The stranger reaches the SuperLink over an address of this machine that is not the loopback, as one
on another machine would, and has ca.crt. Meanwhile an honest run goes on.
"""

import argparse
import hashlib
import json
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

import stranger as attacks
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto import control_pb2, fab_pb2
from flwr.supercore.control import ControlHttpClient

from simfbo.flower.ops import control_api, operators
from simfbo.flower.ops.certificates import node_form
from simfbo.flower.ops.folder import Layout, environment, processes

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SIMFBO = [sys.executable, "-m", "simfbo.cli.main", "flower"]
PORT, ROUNDS = 9800, 60
FLOOD = {"seconds": 20, "size": 100 * 2**20, "connections": 900}
MEMORY = 200  # MB by which the SuperLink may grow under a flood
TASK = '''"""Four clients that agree on a number."""

import jax.numpy as jnp
import numpy as np

from simfbo import BilevelProblem, Point
from simfbo.algorithms import simfbo
from simfbo.flower import Deployment


def upper(x, y, batch):
    return jnp.mean((y - batch) ** 2)


def lower(x, y, batch):
    return jnp.mean((y - x - batch) ** 2)


def deployment(config):
    return Deployment(
        algorithm=simfbo(BilevelProblem(upper, lower), Point(x=0.1, y=0.2, v=0.2)),
        x0=jnp.zeros(()),
        y0=jnp.zeros(()),
        clients=4,
        load_client=lambda i, node: (np.full(3, 1.0, "float32"), np.full(3, i, "float32")),
        example=(np.zeros(1, "float32"), np.zeros(1, "float32")),
        rounds=config["rounds"],
        evaluate=lambda state: {"x": float(state.x), "y": float(state.y)},
        timeout=60.0,
    )
'''


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("before", "after"))
    wanted = parser.parse_args().only
    file = HERE / "results" / "door.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for when, start in (("before", _before), ("after", _after)):
        if wanted in (None, when):
            with _folder() as folder, start(folder) as federation:
                found[when] = measure(federation)
    found = {when: found[when] for when in ("before", "after") if when in found}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")
    for name in found["after"]["attacks"]:
        print(f"| {name} | {' | '.join(_cell(found, when, name) for when in found)} |")
    print(json.dumps({when: found[when]["run"] for when in found}))
    return sum(found["after"]["attacks"].values()) > 0 or not found["after"]["run"]["right"]


def _cell(found, when, name):
    return "succeeds" if found[when]["attacks"][name] else "refused"


class Federation:
    """A federation under attack: its folder, and how its operator talks to the SuperLink."""

    def __init__(self, layout, app, client):
        self.layout, self.app, self.client = layout, app, client
        self.address = f"{_address()}:{PORT}"

    def superlink(self):
        """Return the number of the SuperLink's process."""
        return json.loads(self.layout.state.read_text())["processes"]["superlink"]["pid"]

    def start(self, output):
        """Start an honest run; return its number."""
        settings = output.with_suffix(".toml")
        settings.write_text(f'rounds = {ROUNDS}\nfolder = "{output}"\n')
        return int(self.client.start(self.layout, self.app, settings))


def measure(federation):
    """Return which attacks succeed, what the flood did, and whether the honest run was right."""
    layout = federation.layout
    outside = attacks.Stranger(federation.address, layout.certificates / "ca.crt")
    output = layout.folder.parent / "honest"
    run = federation.start(output)
    wait_for_round(output, 3)
    node = next(one for one in federation.client.nodes(layout) if one["key"] == "node-1")
    private = load_ssh_private_key(layout.key(1).read_bytes(), None)
    public = private.public_key()
    of_operator = federation.client.capture(layout)
    of_node = attacks.node_request(outside, private, int(node["node-id"]))
    local = f"127.0.0.1:{PORT}"
    assert outside.post(of_node[0], of_node[2], of_node[1], local) is not None  # the node's own
    found = {
        "list runs": attacks.list_runs(outside),
        "list nodes": attacks.list_nodes(outside),
        "read a run's log": attacks.read_log(outside, run),
        "register a node's key": attacks.register(outside),
        "join with a key that was not admitted": attacks.join(outside),
        "join as another node, without its private key": attacks.join(outside, public),
        "replay an operator's request": attacks.replay(outside, of_operator, local),
        "replay a node's request": attacks.replay(outside, of_node, local),
        "act as the server of a run": attacks.serve(outside, run),
    }
    flood = _flood(federation, outside, output)
    succeeded = {name: answer is not None for name, answer in found.items()}
    succeeded["flood: memory, or the honest run held up"] = flood["succeeded"]
    renewed = federation.client.renew(layout)
    honest = _finish(federation, output) | {"renewed_meanwhile": renewed}
    app = control_api.bundle(federation.app)
    first = {"submit an app": attacks.submit(outside, app) is not None}
    victim = federation.start(layout.folder.parent / "victim")
    succeeded["stop a run"] = attacks.stop(outside, victim) is not None
    answers = dict(sorted(outside.answers.items()))
    return {"attacks": first | succeeded, "answers": answers, "flood": flood, "run": honest}


def _flood(federation, outside, output):
    """Return what a flood did to the SuperLink's memory and to the honest run."""
    first = _round(output)
    time.sleep(FLOOD["seconds"])
    before, peak, rounds = memory(federation.superlink()), [0.0], _round(output)
    flood = attacks.Flood(outside, **FLOOD)
    watch = threading.Event()

    def look():
        while not watch.wait(0.05):
            peak[0] = max(peak[0], memory(federation.superlink()))

    looking = threading.Thread(target=look)
    looking.start()
    flood.join()
    during = _round(output) - rounds
    watch.set()
    looking.join()
    grown = peak[0] - before
    return {
        "seconds": FLOOD["seconds"],
        "sent_mb": round(flood.sent / 1e6, 1),
        "silent_connections_kept": flood.silent,
        "memory_before_mb": round(before, 1),
        "memory_grown_mb": round(grown, 1),
        "honest_rounds_before": rounds - first,
        "honest_rounds_meanwhile": during,
        "succeeded": grown > MEMORY or during == 0,
    }


def _finish(federation, output):
    """Wait for the honest run's end, and compare it with a simulation."""
    deadline = time.monotonic() + 600
    while not any(line["kind"] == "end" for line in lines(output)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    history = lines(output)
    records = [line for line in history if line["kind"] == "record"]
    wanted = _simulated(federation.app)
    gap = max((abs(r["y"] - w) for r, w in zip(records, wanted, strict=False)), default=1.0)
    return {
        "status": history[-1].get("status", "cut off"),
        "rounds": len(records) - 1,
        "refusals": sum(line["kind"] == "refusal" for line in history),
        "furthest_from_simulation": gap,
        "right": history[-1].get("status") == "finished" and gap < 1e-5,
    }


def _simulated(app):
    """Return y after every round of the same deployment, simulated in another process."""
    code = (
        "import json, runpy; from simfbo.flower import simulate; "
        f"plan = runpy.run_path({str(app / 'task.py')!r})['deployment']({{'rounds': {ROUNDS}}}); "
        "print(json.dumps([r['y'] for r in simulate(plan).records]))"
    )
    words = [sys.executable, "-c", code]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return json.loads(said.splitlines()[-1])


def lines(output):
    file = output / "history.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def _round(output):
    return max((line["round"] for line in lines(output) if line["kind"] == "record"), default=-1)


def wait_for_round(output, number, seconds=200):
    deadline = time.monotonic() + seconds
    while _round(output) < number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"round {number} was not reached")
        time.sleep(0.1)


def memory(pid):
    """Return the memory of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


class Signed:
    """The operator's side of today: every request is signed."""

    start, nodes = staticmethod(control_api.start_run), staticmethod(control_api.list_nodes)

    @staticmethod
    def renew(layout):
        """Replace certificates and keys under the run; return what was said."""
        words = [*SIMFBO, "certs", "--renew", "--folder", str(layout.folder)]
        return " ".join(subprocess.run(words, capture_output=True, text=True).stdout.split())

    @staticmethod
    def capture(layout):
        """Send a request as the operator, and return it as somebody on the way would see it."""
        path, body = "/v1/control/list-runs", control_pb2.ListRunsRequest().SerializeToString()
        key = operators.own_key(layout.operators)
        headers = {operators.HEADER: operators.sign(key, "POST", path, body)}
        inside = attacks.Stranger(f"127.0.0.1:{PORT}", layout.certificates / "ca.crt")
        assert inside.post(path, body, headers) is not None
        return path, headers, body


class Unsigned:
    """The operator's side of before: nothing is signed."""

    @staticmethod
    def client(layout):
        """Return a client of the SuperLink."""
        root = (layout.certificates / "ca.crt").read_bytes()
        return ControlHttpClient.from_server_address(f"127.0.0.1:{PORT}", False, root, [])

    @classmethod
    def start(cls, layout, app, settings):
        """Start a run; return its number."""
        content = control_api.bundle(app)
        config = control_api.user_config_to_proto(control_api.tomllib.loads(settings.read_text()))
        fab = fab_pb2.Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
        request = control_pb2.StartRunRequest(fab=fab, override_config=config)
        return cls.client(layout).StartRun(request).run_id

    @classmethod
    def nodes(cls, layout):
        """Return the nodes, with the names of their keys."""
        found = cls.client(layout).ListNodes(control_pb2.ListNodesRequest()).nodes_info
        names = {node_form(file): file.stem for file in layout.public_keys()}
        return [{"node-id": one.node_id, "key": names.get(one.public_key)} for one in found]

    @staticmethod
    def renew(layout):
        """Do nothing: certificates were replaced while the federation was down."""

    @staticmethod
    def capture(layout):
        """Return a request of the operator."""
        return "/v1/control/list-runs", {}, control_pb2.ListRunsRequest().SerializeToString()


@contextmanager
def _folder():
    """Give a folder with an app in it."""
    root = Path(tempfile.mkdtemp(prefix="simfbo-door-"))
    shutil.copytree(ROOT / "examples" / "flower_app", root / "app")
    (root / "app" / "task.py").write_text(TASK)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _after(root):
    """Give a federation as `simfbo flower up` starts it."""
    folder = root / "federation"
    words = ["--folder", str(folder)]
    up = ["up", *words, "--host", _address(), "--nodes", "2", "--port", str(PORT)]
    print(subprocess.run([*SIMFBO, *up], capture_output=True, text=True, check=True).stdout)
    try:
        yield Federation(Layout(folder), root / "app", Signed)
    finally:
        subprocess.run([*SIMFBO, "down", *words], check=False)


@contextmanager
def _before(root):
    """Give the same federation with Flower's own SuperLink, started as before there was a door."""
    folder = root / "federation"
    words = ["--folder", str(folder)]
    up = ["up", *words, "--host", _address(), "--nodes", "2", "--port", str(PORT)]
    subprocess.run([*SIMFBO, *up], capture_output=True, text=True, check=True)
    subprocess.run([*SIMFBO, "down", *words], check=True)
    layout = Layout(folder)
    jobs = []
    try:
        for process in processes(layout, layout.read_setup()):
            jobs.append(_started(layout, process))
            if process.name == "superlink":
                _wait_for_port()
        state = {"processes": {"superlink": {"pid": jobs[0].pid}}}
        layout.state.write_text(json.dumps(state))
        time.sleep(20)  # for the nodes
        yield Federation(layout, root / "app", Unsigned)
    finally:
        for job in reversed(jobs):
            job.send_signal(signal.SIGTERM)
        for job in jobs:
            try:
                job.wait(timeout=15)
            except subprocess.TimeoutExpired:
                job.kill()
        subprocess.run([*SIMFBO, "down", *words], check=False)


def _wait_for_port(seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", PORT), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError("the SuperLink did not start")


def _started(layout, process):
    """Start a process of a federation, the SuperLink's being Flower's own."""
    command = process.command
    if process.name == "superlink":
        command = ["flower-superlink", *command[4:]]
    with open(layout.log(process.name), "ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=environment(layout, process.name),
            cwd=layout.folder,
        )


def _address():
    """Return an address of this machine that others use."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("198.51.100.1", 9))
        return probe.getsockname()[0]


if __name__ == "__main__":
    sys.exit(main())
