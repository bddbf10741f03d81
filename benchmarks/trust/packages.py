"""Send the server 50,000 mutated packages, as single messages and as sums.

    python benchmarks/trust/packages.py                    (about 10 minutes)

Five nodes hold two clients each. Their responses are those of the real ClientApp; in every exchange
one to five of them are spoilt: numbers, arrays, settings, descriptions, bytes, Flower's records,
the objects these travel as, error replies, and reports of which clients a node holds. They pass
through Flower's own decoding and the server's. After each exchange:

- nothing was raised but what ends a run by rule (too few replies);
- the clients of the nodes left alone count, the sum is theirs, and what a spoilt response that
  still is a possible one adds is within the gate's limit times its clients' weights;
- no node holds other clients than its own, and every tenth exchange, without a mutation, gives the
  same bits as the first.

At the end, memory must not have grown by more than 200 MB.
"""

import argparse
import json
import logging
import random
import resource
import sys
import time
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from simfbo import BilevelProblem, Gate, Point, algorithms
from simfbo.algorithms._simfbo import SimFBO
from simfbo.core.sampling import Cohort
from simfbo.errors import TooFewReplies, UserError
from simfbo.flower import Deployment, discovery
from simfbo.flower import app as adapter
from simfbo.flower.app import FlowerFederation, client_app
from simfbo.flower.transport import Package

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import spoil  # noqa: E402

NODES, CLIENTS, LIMIT = 5, 10, 100.0
LAYERS = ("package", "text", "bytes", "record", "object", "bomb", "error", "hello")
SHARES = (40, 18, 8, 10, 16, 1, 2, 5)


@cache
def method() -> SimFBO:
    """Return SimFBO on a problem whose messages have matrices and two leaves of the same shape."""

    def upper(x, y, batch):
        return ((batch @ y - batch @ x["w"].T @ x["w"]) ** 2).mean() + (x["b"] ** 2).sum()

    def lower(x, y, batch):
        return upper(x, y, batch) + (y**2 * jax.numpy.exp(x["b"])).sum()

    return algorithms.simfbo(BilevelProblem(upper, lower), Point(x=0.1, y=0.1, v=0.1))


def deployment(**options: Any) -> Deployment:
    """Return a run of ten clients; options replace its settings."""

    def load(client, node):
        rng = np.random.default_rng(client)
        return tuple(rng.normal(size=(4, 3)).astype("float32") for _ in range(2))

    x0 = {"w": np.full((2, 3), 0.3, "float32"), "b": np.zeros(3, "float32")}
    y0 = np.ones((3, 3), "float32")
    settings = {"gate": Gate(max_norm=LIMIT), "timeout": 0.05, "wait": 0.05, "p": range(1, 11)}
    return Deployment(method(), x0, y0, CLIENTS, load, load(0, {}), rounds=1, **settings | options)


class Nodes(Grid):
    """A Flower grid in memory whose nodes repeat their first response, spoilt where asked."""

    def __init__(self, plan: Deployment) -> None:
        """Take the deployment; node k holds clients 2 k and 2 k + 1."""
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3
        self.app = client_app(lambda config: plan)
        self.honest: dict[tuple[int, str], Package] = {}
        self.spoilt: dict[int, tuple[str, random.Random]] = {}
        self.tally: Counter[str] = Counter()
        self.kinds: dict[int, str] = {}
        self._waiting: dict[str, Message] = {}
        self._count = 0

    def set_run(self, run):
        """Do nothing of what is not used here."""
        raise NotImplementedError

    run = property(set_run)
    create_message = send_and_receive = set_run

    def get_node_ids(self):
        """Return the nodes, all online."""
        return range(NODES)

    def push_messages(self, messages):
        """Keep messages until their replies are asked for."""
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        self._count += 1
        message.metadata.__dict__["_message_id"] = number = f"message-{self._count}"
        self._waiting[number] = message
        return number

    def pull_messages(self, message_ids):
        """Return the replies to messages."""
        taken = [self._waiting.pop(number, None) for number in message_ids]
        return [reply for message in taken if message for reply in self._reply(message)]

    def _reply(self, message: Message) -> list[Message]:
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        if (node, kind) not in self.honest:
            settings = {"partition-id": node, "num-partitions": NODES}
            reply = self.app(message, Context(7, node, settings, RecordDict(), {"seed": 0}))
            self.honest[node, kind] = adapter._package(reply.content)
        package = self.honest[node, kind]
        settings = dict(package.settings)
        if "exchange" in settings:
            settings["exchange"] = int(message.metadata.group_id)
        layer, rng = self.spoilt.get(node, ("", random.Random(0)))
        if (layer == "hello") != ("hello" in kind):
            layer = ""
        own = Package(settings, dict(package.arrays), package.common)
        return self._spoilt(message, own, layer, rng)

    def _spoilt(
        self, message: Message, package: Package, layer: str, rng: random.Random
    ) -> list[Message]:
        """Return a response, changed on one layer."""
        adapter._SMALL = rng.choice((16, 16 * 1024))
        node = message.metadata.dst_node_id
        if layer == "hello":
            _spoil_hello(package.settings, rng)
            self._note(node, "hello")
            del self.spoilt[node]
        elif layer == "package":
            for kind in rng.sample(list(spoil.PACKAGE), 1 if rng.random() < 0.8 else 2):
                if "ids" in package.arrays or kind in ("settings", "exchange"):
                    spoil.PACKAGE[kind](package.settings, package.arrays, rng)
                    self._note(node, kind)
        elif layer == "error":
            self._note(node, "error")
            reason = rng.choice(("", "\x1b[31mred", "x" * 10_000, "one\ntwo", "\x00"))
            return [Message(Error(rng.choice((0, 1, 2, 8, -1, 99)), reason), reply_to=message)]
        if layer in ("record", "bytes"):
            adapter._SMALL = 16 * 1024
        content = adapter._content(package)
        if layer in ("text", "bytes", "record"):
            self._spoil_content(node, content, layer, rng)
        reply = Message(content, reply_to=message)
        if layer in ("object", "bomb"):
            self._note(node, layer)
            return [_damaged(reply, layer, rng)]
        return [reply] * rng.choice((1, 1, 2))  # the second is a duplicate

    def _spoil_content(
        self, node: int, content: RecordDict, layer: str, rng: random.Random
    ) -> None:
        record: Any = content["texts"]
        if layer == "text":
            kind = rng.choice(list(spoil.TEXT))
            name = rng.choice(("own arrays", "settings")) if kind == "text" else "own arrays"
            record[name] = spoil.TEXT[kind](record[name], rng)
        elif layer == "bytes":
            kind, record["own"] = "bytes", spoil.flipped(record["own"], rng)
        else:
            kind = rng.choice(list(spoil.RECORD))
            spoil.RECORD[kind](content, rng)
        self._note(node, kind)

    def _note(self, node: int, kind: str) -> None:
        self.tally[kind] += 1
        self.kinds[node] = kind


def _spoil_hello(settings: dict[str, Any], rng: random.Random) -> None:
    """Report other clients, or other numbers of samples."""
    own, samples = settings["clients"], settings["samples"]
    clients = (own, [i + 2 for i in own], list(range(CLIENTS)), own[:1], [], own * 2, [*own, 10**9])
    counts = (samples, [2**52] * len(own), [-1, 0], [True] * 2, samples[:1], [2**60] * 2, "8")
    settings["clients"] = rng.choice((*clients, *spoil.ODD))
    settings["samples"] = rng.choice((*counts, *spoil.ODD))


def _damaged(message: Message, layer: str, rng: random.Random) -> Message:
    """Return a message after one of the objects that it travels as was changed."""
    nested = get_all_nested_objects(message)
    objects = {number: bytes(one.deflate()) for number, one in nested.items()}
    number = rng.choice(list(objects))
    if layer == "bomb":
        chunks = [n for n, one in nested.items() if type(one).__name__ == "Array"]
        number = chunks[0] if chunks else number
        first, many = b'"arraychunk_ids": [0', b", 0" * rng.choice((10_000, 1_000_000))
        objects[number] = objects[number].replace(first, first + many)
    else:
        objects[number] = spoil.flipped(objects[number], rng)
        if rng.random() < 0.3:
            old, new = rng.sample((b"ArrayRecord", b"ConfigRecord", b"RecordDict", b"Message"), 2)
            objects[number] = objects[number].replace(old, new, 1)
    return inflate_object_from_contents([*objects][-1], objects)


class Trial:
    """A federation in one mode, and what its honest nodes send."""

    def __init__(self, sums: bool, **options: Any) -> None:
        """Connect, and run an exchange with nothing spoilt; options go to the deployment."""
        self.sums, self.plan = sums, deployment(partial_sums=sums, **options)
        self.grid = Nodes(self.plan)
        self.federation = FlowerFederation(self.grid, self.plan, poll=0.0)
        self.federation.connect()
        self.cohort = Cohort(np.arange(CLIENTS, dtype=np.int32), self.federation.p)
        self.first = self.exchange()
        self.contributions = [self._contribution(node) for node in range(NODES)]

    def exchange(self) -> list[np.ndarray]:
        """Return the leaves of the sum that one exchange gives."""
        plan = self.plan
        step, at = plan.algorithm.simfbo_step, Point(plan.x0, plan.y0, plan.y0)
        found = self.federation.sum(step, at, self.cohort, jax.random.key(0))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]

    def _contribution(self, node: int) -> list[np.ndarray]:
        """Return what an honest node adds to the sum, added up by NumPy."""
        arrays = self.grid.honest[node, "train.simfbo_step"].arrays
        leaves = [a.astype(float) for name, a in arrays.items() if name.startswith("message")]
        weights = self.cohort.weights[2 * node : 2 * node + 2]
        return leaves if self.sums else [np.tensordot(weights, leaf, 1) for leaf in leaves]

    def spoilt_exchange(self, hostile: dict[int, tuple[str, random.Random]]) -> list[str]:
        """Return what went wrong in an exchange with some spoilt responses."""
        self.grid.spoilt, self.grid.kinds = dict(hostile), {}
        for node, (layer, _) in hostile.items():
            if layer == "hello":
                self.federation._discovery.ask_again(node)
        try:
            found: list[np.ndarray] | None = self.exchange()
        except TooFewReplies:
            found = None
        self.grid.spoilt = {}
        latest = self.federation.latest
        assert latest is not None
        self.federation.refusals.clear()
        for refusal in latest.refusals:
            self.grid.tally[f"refused: {refusal.reason}"] += 1
        wrong = self._wrong_holders() + self._unprintable(latest.refusals)
        self._ask_again([node for node, (layer, _) in hostile.items() if layer == "hello"])
        return wrong + self._wrong_sum(found, latest.admitted, hostile)

    def _ask_again(self, nodes: list[int]) -> None:
        """Let nodes that reported nonsense report the truth."""
        for node in nodes:
            self.federation._discovery.ask_again(node)
        if nodes:
            self.exchange()
            self.federation.refusals.clear()

    def _wrong_holders(self) -> list[str]:
        held = self.federation._discovery.holders.items()
        return [f"node {node} holds client {i}" for i, node in held if node != i // 2]

    def _unprintable(self, refusals: list[Any]) -> list[str]:
        texts = [one.text for one in refusals if not one.text.isprintable() or len(one.text) > 400]
        return [f"the text {text!r}" for text in texts]

    def _wrong_sum(
        self, found: list[np.ndarray] | None, admitted: np.ndarray, hostile: dict[int, Any]
    ) -> list[str]:
        """Return how a sum differs from that of the honest nodes by more than it may."""
        honest = [node for node in range(NODES) if node not in hostile]
        if not all(admitted[2 * node] and admitted[2 * node + 1] for node in honest):
            return ["an honest client was refused"]
        must = [node for node, kind in self.grid.kinds.items() if kind in spoil.REFUSED]
        if any(admitted[2 * node : 2 * node + 2].any() for node in must):
            return [f"admitted, of {self.grid.kinds}"]
        if found is None:
            return ["too few replies"] if honest else []
        factor = CLIENTS / admitted.sum()
        rest = [leaf / factor for leaf in found]
        for node in honest:
            pairs = zip(rest, self.contributions[node], strict=True)
            rest = [leaf - own for leaf, own in pairs]
        counted = [i for i in range(CLIENTS) if admitted[i] and i // 2 in hostile]
        effect = float(np.sqrt(sum((leaf.astype(float) ** 2).sum() for leaf in rest)))
        bound = LIMIT * float(self.cohort.weights[counted].sum()) * (1 + 1e-4) + 1e-5
        self.grid.tally["admitted, bounded"] += len(counted)
        return [] if effect <= bound else [f"an effect of {effect:.3g}, at most {bound:.3g}"]

    def require_same(self) -> list[str]:
        """Return whether anything of what was spoilt before is left."""
        found = self.exchange()
        self.federation.refusals.clear()
        same = all(a.tobytes() == b.tobytes() for a, b in zip(found, self.first, strict=True))
        return [] if same else ["an honest exchange differs from the first"]

    def start(self, rng: random.Random) -> list[str]:
        """Return what went wrong in connecting while a node first reports nonsense."""
        fresh = FlowerFederation(self.grid, self.plan._replace(p=None), poll=0.0)
        self.grid.spoilt = {rng.randrange(NODES): ("hello", rng)}
        try:
            fresh.connect()
        except UserError:
            self.grid.tally["hello: did not start"] += 1
        self.grid.spoilt = {}
        fine = np.isfinite(fresh.p).all() and (fresh.p > 0).all()
        return [] if fine else ["weights that cannot be"]


def resident() -> float:
    """Return the megabytes that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def attack(count: int, seed: int, progress: bool = False) -> dict[str, Any]:
    """Send so many packages; return what was found.

    Args:
        count: packages, half of them in either mode.
        seed: of everything.
        progress: print a line now and then.
    """
    discovery._RETRY = 0.0
    small = adapter._SMALL
    rng, failures, exchanges = random.Random(seed), [], 0
    trials = [Trial(sums) for sums in (False, True)]
    sent, warm, begin = 0, resident(), time.monotonic()
    while sent < count:
        trial = trials[exchanges % 2]
        nodes = rng.sample(
            range(NODES), rng.choice((1, 2, 3, 4, 4)) if rng.random() < 0.98 else NODES
        )
        layers = rng.choices(LAYERS, SHARES, k=len(nodes))
        hostile = {
            n: (layer, random.Random(rng.random())) for n, layer in zip(nodes, layers, strict=True)
        }
        exchanges += 1
        sent += len(nodes)
        try:
            wrong = trial.spoilt_exchange(hostile)
            if exchanges % 20 < 2:
                wrong += trial.start(rng) + trial.require_same()
                sent += 1
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        failures += [f"exchange {exchanges}, {layers}, {trial.grid.kinds}: {one}" for one in wrong]
        warm = resident() if exchanges == 200 else warm
        if progress and exchanges % 1000 == 0:
            print(f"{sent} packages, {len(failures)} failures, {resident():.0f} MB", flush=True)
    adapter._SMALL = small
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - warm
    tallies = {"sums" if one.sums else "single messages": one.grid.tally for one in trials}
    return {
        "seed": seed, "packages": sent, "exchanges": exchanges, "failures": failures,
        "seconds": round(time.monotonic() - begin), "growth of memory in MB": round(growth),
        **{name: dict(sorted(tally.items())) for name, tally in tallies.items()},
    }  # fmt: skip


def main() -> None:
    """Send everything; write results/packages.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    discovery.LOG.disabled = True
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.simplefilter("error", RuntimeWarning)
    found = attack(options.count, options.seed, progress=True)
    print(json.dumps(found | {"failures": found["failures"][:20]}, indent=1))
    wrong = len(found["failures"])
    record = json.dumps(found | {"failures": wrong}, indent=1)
    (HERE / "results" / "packages.json").write_text(record + "\n")
    sys.exit(1 if wrong or found["growth of memory in MB"] > 200 else 0)


if __name__ == "__main__":
    main()
