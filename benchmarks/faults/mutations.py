"""Configuration files and flags with something wrong in them, the same ones for the same seed.

A file is held as its keys and the TOML text of their values, {("task", "clients"): "10"}, so that a
mutation can write any value there is, well formed or not. What spoils the text itself (truncation,
bytes) works on the file's bytes.
"""

import json
import random
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from simfbo.config.catalogue import METHODS, TASKS
from simfbo.config.files import as_toml
from simfbo.config.run import load

ROOT = Path(__file__).parents[2]
Keys = dict[tuple[str, ...], str]

VALUES = {
    "wrong type": [
        '"text"', '""', "true", "3.5", "7", "[]", "{}", "[1, 2]", "[[1], 'a', {}]", "{ name = 3 }",
    ],
    "date or time": ["1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", "2023-02-30", "24:00:00"],
    "not finite": ["nan", "-nan", "inf", "-inf", "1e999", "-1e999"],
    "negative or none": ["0", "-1", "-0.0", "-3.5", "-9223372036854775809", "1e-320"],
    "huge": [
        "1e308", "-1e308", "1e9", "1000000000", "2147483648", "4294967296", "9223372036854775808",
        "1" + 30 * "0", "-1" + 30 * "0", "1" + 400 * "0", 5000 * "9", "-" + 5000 * "9",
        "0x" + 6000 * "f", "[" + 3000 * "1, " + "1]", "[1, 99999999999999999999]",
    ],
    "at the edge": [
        "1", "2", "1000", "1001", "100000", "1000000", "2147483647", "4294967295", "1e-320", "1e-9",
        "1e6", "1e300", "0.999999999", "[1000]", "[1, 1, 1, 1, 1, 1, 1, 1, 1, 1000]",
    ],
    "odd text": [
        r'"\u0000"', r'"a\nb"', r'"a\r\nb\tc"', r'"\u2028"', r'"\U0001F600"', '"größe"', '"数"',
        r'"\u202Etxet"', '"' + 5000 * "x" + '"', "'''one\ntwo'''", '"none"', '"full"', '"nan"',
    ],
    "deep value": [
        text
        for k in (3, 60, 900, 3000)
        for text in (
            k * "[" + k * "]",
            k * "{ a = " + "1" + k * " }",
            "{ " + ".".join(k * ["a"]) + " = 1 }",
            k * "[ { a = " + "1" + k * " } ]",
        )
    ],
    "no value": ["", "=", "none", "1 2", "[1", '"open', "{ a = 1", "1__0", "00", "0x", "'''"],
}  # fmt: skip
ODD_KEYS = (
    "", " ", "a b", "task.clients", "task.name", "größe", "数", "a\nb", "\0", "\u2028", "x" * 5000,
    "\U0001f600", "quadratic", "fednest", "seeds", "name", "__class__", "model_config", "1",
)  # fmt: skip
COMPARISON = """seeds = [0, 1, 2]
rounds = 50
every = 10

[task]
name = "quadratic"
clients = 4

[sampling]
size = 2

[methods.simfbo]

[methods.slow]
rounds = 5
local_work = { tau = 5 }
algorithm = { name = "fednest", neumann_terms = 10 }

[methods.fedbio]
sampling = { kind = "without-replacement" }
local_work = { low = 1, high = 5, every_round = true }
"""


class Case(NamedTuple):
    """A command's input: what was done to it, the file, and the flags besides it."""

    kind: str
    source: str
    command: str
    file: bytes
    flags: list[str]


class Source(NamedTuple):
    """A valid file to start from."""

    name: str
    command: str
    text: str


def sources() -> list[Source]:
    """Return the valid files: one per algorithm and task, the paper's and two comparisons."""
    images = {"task.name": "hyper-representation", "task.dataset": "mnist"}
    paper = load(None, {"preset": "paper", **images})
    found = [Source("paper", "run", as_toml(paper))]
    for task in TASKS.names():
        for algorithm in METHODS.names():
            names = {"task.name": task, "algorithm.name": algorithm, "every": 20}
            found.append(Source(f"{task} {algorithm}", "run", as_toml(load(None, names))))
    drawn = {"task.name": "quadratic", "local_work.low": 1, "local_work.high": 5}
    found.append(Source("drawn work", "run", as_toml(load(None, drawn))))
    private = {"task.name": "quadratic", "privacy.where": "client", "aggregation.trim": 0.1}
    found.append(Source("private", "run", as_toml(load(None, private))))
    methods = (ROOT / "examples" / "methods.toml").read_text(encoding="utf-8")
    return [*found, *3 * [Source("comparison", "compare", COMPARISON)],
            Source("methods", "compare", methods)]  # fmt: skip


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield `count` cases; the i-th depends on nothing but the seed and i."""
    valid = sources()
    for i in range(count):
        rng = random.Random(f"{seed} {i}")
        yield _case(rng, rng.choice(valid), valid)


def _case(rng: random.Random, source: Source, valid: list[Source]) -> Case:
    """Return one case: a mutation, at times on top of others."""
    keys = flatten(tomllib.loads(source.text))
    keys = _other(rng, keys, valid) if rng.random() < 0.05 else keys
    kind = rng.choice([*VALUES, *OF_KEYS, *OF_BYTES, *2 * list(OF_FLAGS)])
    if kind in OF_FLAGS:
        flags = [flag for _ in range(rng.choice((1, 1, 2))) for flag in OF_FLAGS[kind](rng, keys)]
        return Case(kind, source.name, source.command, source.text.encode(), flags)
    if kind in OF_BYTES:
        data = OF_BYTES[kind](rng, source.text.encode())
        return Case(kind, source.name, source.command, data, [])
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        keys = OF_KEYS[kind](rng, keys) if kind in OF_KEYS else _replaced(rng, keys, kind)
    return Case(kind, source.name, source.command, written(keys).encode(errors="replace"), [])


def flatten(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Keys:
    """Return the keys of nested dictionaries; an empty table is a key too."""
    found: Keys = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flatten(value, (*path, key))
        else:
            found[(*path, key)] = json.dumps(value, ensure_ascii=False)
    return found


def written(keys: Keys) -> str:
    """Return the keys as a TOML file, a header for each table."""
    tables: dict[tuple[str, ...], list[str]] = {(): []}
    for key, value in keys.items():
        tables.setdefault(key[:-1], []).append(f"{_quoted(key[-1])} = {value}")
    heads = {path: f"\n[{'.'.join(map(_quoted, path))}]" if path else "" for path in tables}
    return "\n".join(line for path in tables for line in (heads[path], *tables[path])) + "\n"


def _quoted(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _some(rng: random.Random, keys: Keys) -> tuple[str, ...]:
    return rng.choice(list(keys)) if keys else ("rounds",)


def _replaced(rng: random.Random, keys: Keys, kind: str) -> Keys:
    return {**keys, _some(rng, keys): rng.choice(VALUES[kind])}


def _renamed(keys: Keys, old: tuple[str, ...], new: tuple[str, ...]) -> Keys:
    """Return the keys with one key or table under another name, its place kept."""
    n = len(old)
    return {new + key[n:] if key[:n] == old else key: value for key, value in keys.items()}


def _typing_error(rng: random.Random, word: str) -> str:
    """Return a word with a letter dropped, doubled, swapped or replaced."""
    i = rng.randrange(max(1, len(word)))
    head, letter, tail = word[:i], word[i : i + 1], word[i + 1 :]
    return rng.choice((head + tail, head + 2 * letter + tail, head + tail[:1] + letter + tail[1:],
                       head + rng.choice("abzé_-.") + tail, word.upper()))  # fmt: skip


def _rename(rng: random.Random, keys: Keys) -> Keys:
    key = _some(rng, keys)
    part = rng.randrange(len(key))
    name = rng.choice(ODD_KEYS) if rng.random() < 0.4 else _typing_error(rng, key[part])
    return _renamed(keys, key[: part + 1], (*key[:part], name))


def _move(rng: random.Random, keys: Keys) -> Keys:
    """Return the keys with one of them in another table."""
    key, other = _some(rng, keys), _some(rng, keys)
    return _renamed(keys, key, (*other[: rng.randrange(len(other) + 1)], key[-1]))


def _delete(rng: random.Random, keys: Keys) -> Keys:
    """Return the keys without one of them, or without a whole table."""
    key = _some(rng, keys)
    path = key[: rng.randrange(len(key)) + 1]
    return {key: value for key, value in keys.items() if key[: len(path)] != path}


def _swap_tables(rng: random.Random, keys: Keys) -> Keys:
    a, b = _some(rng, keys)[:1], _some(rng, keys)[:1]
    return _renamed(_renamed(_renamed(keys, a, ("swap",)), b, a), ("swap",), b)


def _swap_values(rng: random.Random, keys: Keys) -> Keys:
    a, b = _some(rng, keys), _some(rng, keys)
    return keys | {a: keys.get(b, "1"), b: keys.get(a, "1")}


def _table_for_value(rng: random.Random, keys: Keys) -> Keys:
    """Return the keys with a value where a table was, or a table where a value was."""
    key = _some(rng, keys)
    if len(key) == 1 or rng.random() < 0.4:
        return _renamed(keys, key, (*key, rng.choice(("a", "name", "kind", "0"))))
    rest = {other: value for other, value in keys.items() if other[: len(key) - 1] != key[:-1]}
    return {**rest, key[:-1]: rng.choice(VALUES[rng.choice(list(VALUES))])}


def _array_of_tables(rng: random.Random, keys: Keys) -> Keys:
    """Return the keys with a table in an array, once or twice."""
    path = _some(rng, keys)[:1]
    own = {key[1:]: value for key, value in keys.items() if key[:1] == path and len(key) > 1}
    table = ", ".join(f"{'.'.join(map(_quoted, key))} = {value}" for key, value in own.items())
    rest = {key: value for key, value in keys.items() if key[:1] != path}
    return {**rest, path: "[" + ", ".join(rng.choice((1, 2)) * [f"{{ {table} }}"]) + "]"}


def _deep_table(rng: random.Random, keys: Keys) -> Keys:
    """Return the keys with one far down."""
    start = rng.choice([(), ("task",), ("algorithm", "local"), ("methods", "slow"), ("rounds",)])
    depth = rng.choice((4, 30, 400, 3000))
    return {**keys, (*start, *depth * [rng.choice(("a", "task", "methods"))]): "1"}


def _unknown(rng: random.Random, keys: Keys) -> Keys:
    path = _some(rng, keys)
    return {**keys, (*path[: rng.randrange(len(path))], rng.choice(ODD_KEYS)): "1"}


def _other(rng: random.Random, keys: Keys, valid: list[Source]) -> Keys:
    """Return the keys with a table, or a value, of another valid file."""
    others = flatten(tomllib.loads(rng.choice(valid).text))
    path = _some(rng, others)[:1]
    rest = {key: value for key, value in keys.items() if key[:1] != path}
    return rest | {key: value for key, value in others.items() if key[:1] == path}


OF_KEYS: dict[str, Callable[[random.Random, Keys], Keys]] = {
    "key renamed": _rename,
    "key moved": _move,
    "key or table deleted": _delete,
    "unknown key": _unknown,
    "tables swapped": _swap_tables,
    "values swapped": _swap_values,
    "table for a value": _table_for_value,
    "array of tables": _array_of_tables,
    "deep table": _deep_table,
}


def _repeated_line(rng: random.Random, data: bytes) -> bytes:
    """Return the file with one line twice."""
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[: (i := rng.randrange(len(lines)))], lines[i], *lines[i:]])


def _flipped(rng: random.Random, data: bytes) -> bytes:
    """Return the file with one to eight bits flipped."""
    spoilt = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


def _inserted(rng: random.Random, data: bytes) -> bytes:
    """Return the file with bytes in it that do not belong there."""
    place = rng.randrange(len(data) + 1)
    bad = rng.choice((b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\r", b"\x1b[31m", b"\x7f", b'"'))
    return data[:place] + bad + data[place:]


def _whole(rng: random.Random, data: bytes) -> bytes:
    """Return a file that is something else altogether."""
    return rng.choice((
        b"", b"\n\n", b"# nothing\n", b"\xef\xbb\xbf" + data, data.decode().encode("utf-16"),
        rng.randbytes(200), b"\x89PNG\r\n\x1a\n", b'{"task": {"name": "quadratic"}}',
        b"task:\n  name: quadratic\n", data.replace(b"\n", b"\r\n"), data + data,
        b"[" * 5000, b"a." * 2000 + b"a = 1\n", b"[[task]]\n" + data, b"x" * 100_000,
    ))  # fmt: skip


OF_BYTES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "line repeated": _repeated_line,
    "truncated": lambda rng, data: data[: rng.randrange(len(data))],
    "bits flipped": _flipped,
    "bytes inserted": _inserted,
    "other file": _whole,
}


def _setting(rng: random.Random, keys: Keys) -> list[str]:
    """Return a --set flag with a bad key, a bad value or neither."""
    key = ".".join(_some(rng, keys))
    key = _typing_error(rng, key) if rng.random() < 0.3 else key
    key = rng.choice(ODD_KEYS) if rng.random() < 0.1 else key
    key += rng.choice((".a", 2000 * ".a", "..", ".name")) if rng.random() < 0.1 else ""
    value = rng.choice(VALUES[rng.choice(list(VALUES))])
    value += rng.choice(("\nrounds = 3", "\udcff", "\n", " # note")) if rng.random() < 0.1 else ""
    return [f"--set={key}{rng.choice(('=', '=', '=', '=', ' = ', ''))}{value}"]


def _shortcut(rng: random.Random, keys: Keys) -> list[str]:
    """Return one of the short flags with any value."""
    names = (
        "rounds",
        "every",
        "clients",
        "cohort",
        "tau",
        "engine",
        "dataset",
        "partition",
        "typo",
    )
    ranges = ("1..3", "3..1", "1..", "..", "1..2..3", "0..99999999999", "1,2,3", "1,,2", "a,b", ",")
    value = rng.choice([*ranges, *VALUES[rng.choice(list(VALUES))], "1\n2", "\udcff"])
    return [f"--{rng.choice(names)}={value}"]


OF_FLAGS: dict[str, Callable[[random.Random, Keys], list[str]]] = {
    "--set": _setting,
    "short flag": _shortcut,
}
