"""Send the gate 20,000 replies with something wrong in them.

    python benchmarks/faults/replies.py         (about 2 minutes)

In every exchange four clients reply; one to three of the replies are spoilt, strays are added and
all are shuffled. Nothing but an answer may come out; the replies that were left alone must count,
bit for bit; none that is spoilt may, unless it is still what was asked for (by a second, slower
reading of the rules); and the order of arrival must not matter.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from simfbo.core.exchange import Request
from simfbo.core.gate import Gate, Reply, admit
from simfbo.core.problem import Point

HERE = Path(__file__).parent
IDS = (2, 3, 5, 9)
GATE = Gate(max_norm=100.0)
SHAPES = {".x['b']": (3,), ".x['w']": (3, 4), ".y": (), ".v": (2, 1, 2)}


def asked(number: int) -> Request:
    """Return the exchange of this number."""
    like = Point({name: np.zeros(SHAPES[f".x['{name}']"], "float32") for name in "bw"},
                 np.zeros((), "float32"), np.zeros((2, 1, 2), "float32"))  # fmt: skip
    return Request(number, "work", np.array(IDS), like)


def good(client: int, number: int, rng: random.Random) -> Reply:
    """Return a reply with nothing wrong in it."""
    draw = np.random.default_rng(rng.randrange(2**32))
    arrays = {name: np.asarray(draw.normal(size=s), "float32") for name, s in SHAPES.items()}
    return Reply(client, number, arrays)


ODD = (
    *(None, True, -1, 0, 2**70, 10**5000, 1e300, float("nan"), "", "x" * 10_000, b"\0", 3 + 4j),
    *([], {}, (), object(), range(3), Reply, len, lambda: 1, {"a": {"b": 1}}, np.float32(2)),
    *(np.array(["a"]), np.array([None, {}]), np.datetime64("2020-01-01"), np.array(7)),
    *(np.ma.masked_array([1.0], [True]), np.zeros((0, 5))),
)
NUMBERS = (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e20, 1e-45, -0.0)
DTYPES = ("float64", "float16", "int32", ">f4", "complex64", "bool", "object", "U3", "V4", "S2")


def spoil_value(reply: Reply, rng: random.Random) -> Reply:
    """Return the reply with one number changed."""
    name = rng.choice(list(SHAPES))
    array = np.array(reply.arrays[name])
    array.reshape(-1)[rng.randrange(array.size)] = rng.choice(NUMBERS)
    return reply._replace(arrays={**reply.arrays, name: array})


def spoil_array(reply: Reply, rng: random.Random) -> Reply:
    """Return the reply with another array, or none, in place of one."""
    name = rng.choice(list(SHAPES))
    array = np.array(reply.arrays[name])
    others: list[Callable[[], Any]] = [
        lambda: rng.choice(ODD),
        lambda: array[None],
        lambda: array.reshape(-1),
        lambda: array.T,
        lambda: array.tolist(),
        lambda: array.astype(rng.choice(DTYPES)),
        lambda: array[..., :0] if array.ndim else array,
        lambda: np.resize(array, rng.randrange(50)),
        lambda: array * np.float32(10.0 ** rng.randrange(39)),
    ]
    with np.errstate(all="ignore"):
        other = rng.choice(others)()
    return reply._replace(arrays={**reply.arrays, name: other})


def spoil_keys(reply: Reply, rng: random.Random) -> Reply:
    """Return the reply with a key left out, added or renamed."""
    arrays = dict(reply.arrays)
    name = rng.choice(list(arrays))
    taken = arrays.pop(name)
    new = rng.choice([name.upper(), name + " ", name[1:], "", 7, None, (1, 2), "\0", "é" * 99])
    if rng.random() < 0.6:
        arrays[new] = taken
    if rng.random() < 0.3:
        arrays[name] = taken
    return reply._replace(arrays=arrays)


def spoil_head(reply: Reply, rng: random.Random) -> Reply:
    """Return the reply from another client, to another exchange, or another draw."""
    field = rng.choice(("client", "exchange", "repeat"))
    near = getattr(reply, field) + rng.choice((-1, 1, 100))
    return reply._replace(**{field: rng.choice((near, float(near), str(near), rng.choice(ODD)))})


def spoil_whole(reply: Reply, rng: random.Random) -> Any:
    """Return something else in place of the reply."""
    other = (reply.arrays, tuple(reply), list(reply), rng.choice(ODD))
    return rng.choice((*other, reply._replace(arrays=rng.choice(ODD))))


def spoil_twice(reply: Reply, rng: random.Random) -> Any:
    """Return two replies in place of one."""
    return [reply, rng.choice((reply, spoil_value(reply, rng)))]


SPOIL: dict[str, Callable[[Reply, random.Random], Any]] = {
    "a number": spoil_value,
    "an array": spoil_array,
    "keys": spoil_keys,
    "who and when": spoil_head,
    "the whole": spoil_whole,
    "twice": spoil_twice,
}


def is_fine(reply: Any, number: int) -> bool:
    """Return whether a reply is what was asked for: the rules once more, written plainly."""
    if type(reply) is not Reply or type(reply.arrays) is not dict:
        return False
    heads = (reply.client, reply.exchange, reply.repeat)
    if (
        not all(type(h) is int for h in heads)
        or reply.client not in IDS
        or heads[1:] != (number, 0)
    ):
        return False
    if set(reply.arrays) != set(SHAPES):
        return False
    for name, shape in SHAPES.items():
        array = reply.arrays[name]
        if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.shape != shape:
            return False
    numbers = np.concatenate([np.ravel(a).astype(float) for a in reply.arrays.values()])
    return bool(np.isfinite(numbers).all() and np.linalg.norm(numbers) <= 100.0)


def exchange(number: int, rng: random.Random, tally: Counter) -> list[str]:
    """Return what went wrong in one exchange with spoilt replies."""
    replies = {client: good(client, number, rng) for client in IDS}
    sent: list[Any] = []
    for client in IDS[: rng.randint(1, 3)]:
        kind = rng.choice(list(SPOIL))
        tally[kind] += 1
        spoilt = SPOIL[kind](replies.pop(client), rng)
        sent += spoilt if kind == "twice" else [spoilt]
    sent += replies.values()
    rng.shuffle(sent)
    first, second = (admit(order, asked(number), GATE) for order in (sent, sent[::-1]))
    wrong = [] if first.refusals == second.refusals else ["the order of arrival changed a refusal"]
    claims = Counter(
        reply.client for reply in sent
        if type(reply) is Reply and type(reply.client) is int
        and (type(reply.exchange), reply.exchange, type(reply.repeat), reply.repeat)
        == (int, number, int, 0)
    )  # fmt: skip
    for place, client in enumerate(IDS):
        own = [r for r in sent if is_fine(r, number) and r.client == client]
        expected = own[0] if len(own) == 1 and claims[client] == 1 else None
        for found in (first.messages[place], second.messages[place]):
            if (found is None) != (expected is None):
                wrong.append(f"client {client} was {'refused' if found is None else 'admitted'}")
            elif expected is not None and found.y.tobytes() != expected.arrays[".y"].tobytes():
                wrong.append(f"client {client}'s message changed")
    tally["admitted"] += sum(message is not None for message in first.messages)
    tally["refused"] += len(first.refusals)
    return wrong


def main() -> None:
    """Send everything; write results/replies.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replies", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, tally, failures, number = random.Random(options.seed), Counter(), [], 0
    while sum(tally[kind] for kind in SPOIL) < options.replies:
        number += 1
        try:
            failures += [f"exchange {number}: {text}" for text in exchange(number, rng, tally)]
        except Exception as error:
            failures.append(f"exchange {number}: {type(error).__name__}: {error}")
    found = {"seed": options.seed, "exchanges": number, "failures": len(failures), **tally}
    print("\n".join(failures[:20]), json.dumps(found, indent=1))
    (HERE / "results" / "replies.json").write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
