"""Serialisation of trees of arrays, without executing anything that is received.

A message is one block of bytes, little-endian and in C order, and a JSON text that describes the
arrays in it. The reader checks every size before it uses a byte. The structure of a tree (tuples,
dicts, `Point`) is sent as JSON too; parts shaped like x or y are only named, since both sides know
them.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.exchange import Reason
from simfbo.core.ledger import PerClient
from simfbo.core.problem import Point, PyTree, Weighted
from simfbo.errors import UserError, brief

_TYPES = (
    *("bool", "bfloat16", "float16", "float32", "float64"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
_PLAIN = {"tuple": tuple, "list": list, "OrderedDict": lambda found: OrderedDict(*found)}
_RECORDS = {kind.__name__: kind for kind in (Point, PerClient, Weighted)}


class BadPackage(ValueError):
    """An invalid package; the text completes "sent ..." and describes it.

    Attributes:
        reason: the kind of the resulting refusal.
    """

    def __init__(self, text: str, reason: Reason = Reason.MALFORMED) -> None:
        """Take the description, and the kind of the refusal."""
        super().__init__(text)
        self.reason = reason


def pack(arrays: Mapping[str, Any]) -> tuple[bytes, str]:
    """Join arrays to one block of bytes, with a description.

    Example:
        >>> block, description = pack({"x": np.array([1.0, 2.0], "float32")})
        >>> len(block), description
        (8, '[["x", "float32", [2]]]')
    """
    hosted = {name: _little_endian(np.asarray(array)) for name, array in arrays.items()}
    description = [[name, a.dtype.name, list(a.shape)] for name, a in hosted.items()]
    return b"".join(a.tobytes() for a in hosted.values()), json.dumps(description)


def unpack(block: Any, description: Any) -> dict[str, np.ndarray]:
    """Read the arrays in a block; raise `BadPackage` if it does not match its description.

    Example:
        >>> unpack(*pack({"n": np.array([1, 2], "int32")}))
        {'n': array([1, 2], dtype=int32)}
    """
    if not isinstance(block, bytes):
        raise BadPackage(f"a {type(block).__name__} in place of bytes")
    rows = [_row(row) for row in _rows(description)]
    sizes = [_count(shape) * dtype.itemsize for _, dtype, shape in rows]
    ends = np.cumsum([0, *sizes], dtype=object)
    if ends[-1] != len(block):
        raise BadPackage(f"{len(block)} bytes where its description needs {brief(ends[-1])}")
    arrays = {}
    for (name, dtype, shape), (start, end) in zip(rows, pairwise(ends), strict=True):
        if name in arrays:
            raise BadPackage("the same array twice")
        arrays[name] = _array(block[start:end], dtype, shape)
    return arrays


def encode(tree: PyTree, known: Mapping[str, PyTree]) -> str:
    """Encode the structure of a tree as JSON.

    Args:
        tree: made of tuples, lists, dicts, `Point`, `PerClient`, None, arrays, and anything shaped
            like one of the known trees.
        known: trees that the reader knows by the same names.

    Returns:
        JSON, without the arrays.

    Example:
        >>> encode((1.0, {"w": 2.0, "b": 3.0}), known={"x": {"w": 0.0, "b": 0.0}})
        '["tuple", null, "x"]'
    """
    forms = {name: jax.tree.structure(shape) for name, shape in known.items()}
    return json.dumps(_encoded(tree, forms))


def decode(text: str, leaves: Sequence[Any], known: Mapping[str, PyTree]) -> PyTree:
    """Fill the structure of a tree with leaves, in order; the inverse of `encode`.

    Example:
        >>> decode('["tuple", null, "x"]', [1, 2, 3], known={"x": {"w": 0.0, "b": 0.0}})
        (1, {'b': 2, 'w': 3})
    """
    supply = iter(leaves)
    try:
        tree = _decoded(json.loads(text), supply, known)
    except (StopIteration, ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadPackage("a tree whose shape cannot be read") from error
    if next(supply, None) is not None:
        raise BadPackage("more arrays than its tree has leaves")
    return tree


def _encoded(tree: PyTree, forms: Mapping[str, Any]) -> PyTree:
    """Return the JSON value of a tree's structure."""
    if tree is None:
        return ["NoneType"]
    structure = jax.tree.structure(tree)
    if structure == jax.tree.structure(0):
        return None
    for name, form in forms.items():
        if structure == form:
            return name
    kind = type(tree).__name__
    if type(tree) in (tuple, list, *_RECORDS.values()):
        return [kind, *(_encoded(part, forms) for part in tree)]
    if type(tree) in (dict, OrderedDict) and all(isinstance(key, str) for key in tree):
        ordered = type(tree) is OrderedDict
        items = tree.items() if ordered else sorted(tree.items())
        entries = {key: _encoded(part, forms) for key, part in items}
        return [kind, entries] if ordered else entries
    raise UserError(
        f"A payload holds a {kind}, which cannot be sent: use tuples, lists, dicts with text keys "
        "and Point, or the types of x0 and y0."
    )


def _decoded(value: Any, supply: Any, known: Mapping[str, PyTree]) -> PyTree:
    """Build the tree of a JSON value, with leaves from the supply."""
    if value is None:
        return next(supply)
    if isinstance(value, str):
        form = jax.tree.structure(known[value])
        return jax.tree.unflatten(form, [next(supply) for _ in range(form.num_leaves)])
    if isinstance(value, dict):
        return {key: _decoded(part, supply, known) for key, part in value.items()}
    kind, *parts = value
    if kind == "NoneType":
        return None
    children = [_decoded(part, supply, known) for part in parts]
    return _RECORDS[kind](*children) if kind in _RECORDS else _PLAIN[kind](children)


def _rows(description: str) -> list[Any]:
    try:
        rows = json.loads(description)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadPackage("a description that is not JSON") from error
    if not isinstance(rows, list):
        raise BadPackage("a description that is not a list")
    return rows


def _row(row: Any) -> tuple[str, np.dtype, tuple[int, ...]]:
    """Validate a row of a description: name, type and shape of an array."""
    match row:
        case [str(name), str(kind), list(shape)] if _is_shape(shape):
            if kind not in _TYPES:
                raise BadPackage(f"an array of the unknown type {brief(kind)}")
            return name, jnp.dtype(kind), tuple(shape)
        case _:
            raise BadPackage("an array without a name, a type and a shape")


def _is_shape(shape: list[Any]) -> bool:
    """Check whether a list can be a shape; limits keep the number of elements small enough."""
    return len(shape) <= 64 and all(type(n) is int and 0 <= n < 2**63 for n in shape)


def _array(block: bytes, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    flat = np.frombuffer(block, dtype.newbyteorder("<")).astype(dtype, copy=False)
    try:
        return flat.reshape(shape)
    except ValueError as error:  # more axes than NumPy has, or an empty array with a huge one
        raise BadPackage("an array of an impossible shape") from error


def _little_endian(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _count(shape: tuple[int, ...]) -> int:
    """Return the exact number of elements of an array of this shape, of any size."""
    count = 1
    for length in shape:
        count *= length
    return count
