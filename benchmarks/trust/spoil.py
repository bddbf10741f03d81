"""Ways to spoil a response of a node, on every layer that the server decodes.

A mutation takes what it changes and a source of random numbers. Those in `REFUSED` leave nothing
that the server may count; what the others leave may still be a possible response, whose effect must
be bounded.
"""

import json
import random
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

Arrays = dict[str, np.ndarray]
Json = dict[str, Any]

ODD = (
    *(None, True, False, -1, 0, 2**70, 1e300, float("nan"), float("inf"), "", "x" * 5000),
    *(
        "\x1b[2J",
        "\ud800",
        [],
        {},
        [[]],
        {"a": {"b": 1}},
        [1, "a", None],
        "1",
        1.5,
        [True],
        [-1],
        [2**62, 4],
    ),
)
NUMBERS = (np.nan, np.inf, -np.inf, 1e18, -1e18, 3e38, 1e-45, 1e-30, -0.0, 1e6)
TYPES = ("float64", "float16", "int32", "int64", "uint8", "bool")
NAMES = ("object", ">f4", "str", "S4", "V8", "datetime64[s]", "complex64", "bfloat16", "\ud800", "")


def message_name(arrays: Arrays, rng: random.Random) -> str:
    """Return the name of one array of a message."""
    return rng.choice([name for name in arrays if name.startswith("message")])


# Arrays and settings, as a node's own code would send them.


def number(settings: Json, arrays: Arrays, rng: random.Random) -> None:
    """Change one number, or all, of a message."""
    name = message_name(arrays, rng)
    array = np.array(arrays[name])
    place = rng.randrange(array.size) if rng.random() < 0.5 else slice(None)
    array.reshape(-1)[place] = rng.choice(NUMBERS)
    arrays[name] = array


def scaled(settings: Json, arrays: Arrays, rng: random.Random) -> None:
    """Multiply a message."""
    name = message_name(arrays, rng)
    with np.errstate(over="ignore"):
        arrays[name] = arrays[name] * np.float32(rng.choice((-1, 0, 3, -10, 1e3, 1e9, 1e18, 1e30)))


def shape(settings: Json, arrays: Arrays, rng: random.Random) -> None:
    """Send a message of another shape."""
    name = rng.choice([one for one in arrays if arrays[one].ndim and one.startswith("message")])
    a = np.array(arrays[name])
    flat = a.reshape(-1)
    others = (a[None], a[..., None], flat[:-1], np.append(flat, flat[:1]), a[..., :0], a[:0],
              flat[0].reshape(()), a.reshape(*a.shape, *([1] * 40)))  # fmt: skip
    transposed = a.swapaxes(-1, -2) if a.ndim > 1 else a[None]
    arrays[name] = rng.choice((*others, transposed if transposed.shape != a.shape else a[None]))


def dtype(settings: Json, arrays: Arrays, rng: random.Random) -> None:
    """Send numbers of another type."""
    name = message_name(arrays, rng)
    with np.errstate(all="ignore"):
        arrays[name] = arrays[name].astype(rng.choice(TYPES))


def names(settings: Json, arrays: Arrays, rng: random.Random) -> None:
    """Leave an array out, rename it or add one."""
    name = rng.choice(list(arrays))
    taken = arrays.pop(name)
    if rng.random() < 0.6:
        arrays[rng.choice((name.upper(), name + " ", name[1:], "", "\x1b", "message.z"))] = taken
        if rng.random() < 0.5:
            arrays[name] = taken


def order(settings: Json, arrays: Arrays, rng: random.Random) -> None:
    """Send the arrays in another order."""
    found = list(arrays.items())
    first = rng.randrange(len(found) - 1)
    found[first], found[first + 1] = found[first + 1], found[first]
    arrays.clear()
    arrays.update(found)


def clients(settings: Json, arrays: Arrays, rng: random.Random) -> None:
    """Reply for other clients, or for one twice."""
    ids = arrays["ids"]
    others = (ids + 1, ids - 2, ids[:1], ids[::-1], np.repeat(ids, 2), np.repeat(ids[:1], len(ids)),
              ids.astype("float32"), ids[None], ids * 0 - 1, ids[:0], ids > 0)  # fmt: skip
    arrays["ids"] = rng.choice(others)


def exchange(settings: Json, arrays: Arrays, rng: random.Random) -> None:
    """Answer another exchange."""
    here = settings["exchange"]
    others = (here + 1, here - 1, float(here), str(here), [here], -here, *ODD)
    settings["exchange"] = rng.choice(others)
    if rng.random() < 0.1:
        del settings["exchange"]


def passed(settings: Json, arrays: Arrays, rng: random.Random) -> None:
    """Lie about who is in a sum; for single messages, about repeats."""
    name = "passed" if "passed" in arrays else "repeats"
    a = arrays[name]
    arrays[name] = rng.choice((~a, a[:1], a[None], a.astype("float32"), np.append(a, a), a[:0]))


def squares(settings: Json, arrays: Arrays, rng: random.Random) -> None:
    """Lie about the norms of the messages in a sum, and about the sum; or about one number."""
    if "squares" not in arrays:
        return number(settings, arrays, rng)
    a = np.array(arrays["squares"])
    one = np.array(a)
    one.reshape(-1)[rng.randrange(a.size)] = rng.choice((np.nan, np.inf, -1.0, 1e300, 1e36, 1e-300))
    arrays["squares"] = rng.choice((one, a[:1], a.T, a[None], a.astype("float32"), a * 0, a * 1e6))
    if rng.random() < 0.5:
        scaled(settings, arrays, rng)


def settings_(settings: Json, arrays: Arrays, rng: random.Random) -> None:
    """Report nonsense that is only shown."""
    for name in rng.sample(("began", "load", "compute", "clients", "p", "weights"), 3):
        settings[name] = rng.choice((*ODD, 1e11, 1e12, 2**63))


# Texts and bytes, as they travel.


def description(text: str, rng: random.Random) -> str:
    """Change a field of one row of a description."""
    rows = json.loads(text)
    row = rng.choice(rows)
    where = rng.randrange(3)
    own = row[2]
    many = [own[::-1], [-n for n in own], [2**62, *own], [str(n) for n in own], [[n] for n in own],
            [n + 0.0 for n in own], [True], own + [1] * 70, [0, 2**63],
            [10**4000] * 500, [2**62] * 64]  # fmt: skip
    row[where] = rng.choice((*ODD, *((*NAMES, *TYPES) if where == 1 else many if where else ())))
    return json.dumps(rows)


def rows(text: str, rng: random.Random) -> str:
    """Add, repeat, remove or swap rows of a description."""
    found = json.loads(text)
    k = rng.randrange(len(found))
    others = ([*found, found[k]], found[:k] + found[k + 1 :], found[::-1], [], {"a": 1}, None,
              [*found, rng.choice(ODD)], [found], found * 50)  # fmt: skip
    return json.dumps(rng.choice(others))


def text(value: str, rng: random.Random) -> str:
    """Damage a JSON text."""
    letters = list(value)
    for _ in range(rng.randint(1, 4)):
        letters[rng.randrange(len(letters))] = rng.choice('[]",-0123456789.eE{}:nul \x00é')
    deep = rng.choice(("[" * 100_000, '{"a":' * 50_000, "[" * 900 + "]" * 900))
    return rng.choice(("".join(letters), "".join(letters), value[: len(value) // 2], deep, ""))


def flipped(block: bytes, rng: random.Random) -> bytes:
    """Flip bits, cut, or extend."""
    found = bytearray(block)
    for _ in range(rng.randint(1, 3)):
        if found:
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    others = (bytes(found), bytes(found), block[:-1], block + b"\0", b"", block * 3, block[1:])
    return rng.choice(others)


# Flower's records.


def texts_of(content: RecordDict) -> Any:
    return content["texts"]


def wrong_values(content: RecordDict, rng: random.Random) -> None:
    """Put values of other types into the record, or leave them out."""
    record = texts_of(content)
    name = rng.choice(list(record))
    value = rng.choice((1, 1.5, "text", b"\xff\xfe\xfd", [1, 2], [1.0], ["a"], [b"a"], True, None))
    if value is None:
        del record[name]
    else:
        record[name] = value


def wrong_records(content: RecordDict, rng: random.Random) -> None:
    """Put records of other kinds in place of ours."""
    name = rng.choice(("texts", "own", "common"))
    other = rng.choice((ArrayRecord(), MetricRecord({"a": 1}), ConfigRecord({"block": b"1"}), None))
    if other is None:
        content.clear()
    else:
        content[name] = other


def npy(header: bytes, data: bytes = b"") -> bytes:
    """Return a file of NumPy's with any header."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


def wrong_block(content: RecordDict, rng: random.Random) -> None:
    """Put an array of another kind in place of the block: huge by its header, pickled, damaged."""
    stream = BytesIO()
    np.save(stream, np.arange(4.0))
    whole = stream.getvalue()
    header = b"{'descr': '%s', 'fortran_order': %s, 'shape': %s, }\n"
    huge = npy(header % (b"|u1", b"False", b"(%d,)" % 2 ** rng.choice((30, 40, 62, 70))))
    pickled = npy(header % (b"|O", b"False", b"(1,)"), b"cos\nsystem\n(S'true'\ntR.")
    data = rng.choice((whole, huge, pickled, flipped(whole, rng), npy(b"(" * 5000), b""))
    kind = rng.choice(("numpy.ndarray", "torch.tensor", ""))
    content["own"] = ArrayRecord({"block": Array("uint8", (4,), kind, data)})


PACKAGE: dict[str, Callable[[Json, Arrays, random.Random], None]] = {
    "number": number, "scaled": scaled, "shape": shape, "dtype": dtype, "names": names,
    "order": order, "clients": clients, "exchange": exchange, "passed": passed,
    "squares": squares, "settings": settings_,
}  # fmt: skip
TEXT = {"description": description, "rows": rows, "text": text}
RECORD = {"values": wrong_values, "records": wrong_records, "block": wrong_block}
REFUSED = {"shape", "dtype", "order", "clients", "records", "block"}
