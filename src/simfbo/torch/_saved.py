"""Traced losses in a file, for machines without PyTorch.

The file is JSON, which Flower packs into an app: the graphs of each loss for several batch sizes,
and arrays in base64.
"""

import base64
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.problem import PyTree
from simfbo.errors import UserError
from simfbo.runs.files import write_atomic
from simfbo.torch._graph import Dtype, Graph, Node, Value, form_of, replay
from simfbo.torch._loss import TorchFunction
from simfbo.torch.operators import TABLE

_FORMAT = 1
_KINDS = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"}
)


class Saved(NamedTuple):
    """The content of a file.

    Attributes:
        losses: functions (x, y, batch) -> scalar by name, in JAX.
        x0: initial upper variable.
        y0: initial lower variable.
    """

    losses: dict[str, Callable[[PyTree, PyTree, PyTree], jax.Array]]
    x0: PyTree
    y0: PyTree


def save(
    path: str | Path,
    losses: Mapping[str, Any],
    x0: PyTree,
    y0: PyTree,
    batch: PyTree,
    *,
    sizes: Sequence[int] = (),
) -> None:
    """Write traced losses to a file that `restore` reads without PyTorch.

    Args:
        path: the file, which should end in .json so that Flower packs it into an app.
        losses: losses from `from_torch` by name, such as upper and lower; metrics too, as long as
            they are means over the samples of a batch.
        x0: initial upper variable, of dictionaries, lists and arrays.
        y0: initial lower variable.
        batch: an example of a few samples.
        sizes: batch sizes to trace for. Batches of other sizes are computed sample by sample,
            which is correct only for losses that are means over samples; this is checked on the
            example.
    """
    if any(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(batch)):
        raise UserError("Every array of a batch needs an axis that counts samples.")
    for name, loss in losses.items():
        _require_mean(name, loss, x0, y0, batch)
    arrays: list[np.ndarray] = []
    graphs = {
        name: [_graph_for(loss, x0, y0, batch, size, arrays) for size in sorted({1, *sizes})]
        for name, loss in losses.items()
    }
    start = {"x0": _encoded_tree(x0, arrays), "y0": _encoded_tree(y0, arrays)}
    stored = {"format": _FORMAT, "losses": graphs, **start, "arrays": [*map(_packed, arrays)]}
    _decoded_file(stored)  # raises if it could not be read
    stored["sha256"] = _digest(stored)
    write_atomic(Path(path), json.dumps(stored, allow_nan=False) + "\n")


def restore(path: str | Path) -> Saved:
    """Read losses written by `save`, without PyTorch.

    Args:
        path: the file.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"There is no file {file}: write it with simfbo.torch.save.")
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["format"] != _FORMAT:
            raise ValueError(f"its format is {stored['format']}, not {_FORMAT}")
        if stored.pop("sha256") != _digest(stored):
            raise ValueError("it has been changed")
        return _decoded_file(stored)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{file} is not a file that this version can read ({error}): write it again with "
            "simfbo.torch.save."
        ) from None


def _decoded_file(stored: Any) -> Saved:
    """Build losses and variables from a file's JSON."""
    arrays = [_unpacked(stored_array) for stored_array in stored["arrays"]]
    losses = {name: _loss(name, graphs, arrays) for name, graphs in stored["losses"].items()}
    return Saved(losses, *(_decoded_tree(stored[key], arrays) for key in ("x0", "y0")))


def _digest(stored: Any) -> str:
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()


def _require_mean(name: str, loss: Any, x0: PyTree, y0: PyTree, batch: PyTree) -> None:
    """Raise unless a loss is the mean of its values on an example's single samples."""
    if not isinstance(loss, TorchFunction):
        raise UserError("Only losses from simfbo.torch.from_torch can be saved.")
    value = jax.jit(loss)
    samples = jax.tree.map(lambda a: np.asarray(a)[np.arange(3) % len(a)], batch)
    singles = [value(x0, y0, jax.tree.map(lambda a, i=i: a[i : i + 1], samples)) for i in range(3)]
    if not np.allclose(value(x0, y0, samples), np.mean(singles), rtol=1e-3, equal_nan=True):
        raise UserError(
            f"'{name}' is not a mean over the samples of a batch, which a loss must be: weights of "
            "classes, ignored labels and sums make it another function for every batch."
        )


def _graph_for(
    loss: Any, x0: PyTree, y0: PyTree, batch: PyTree, size: int, arrays: list[np.ndarray]
) -> Any:
    """Encode a loss's graph for batches of one size."""
    sized = jax.tree.map(lambda a: np.zeros((size, *np.shape(a)[1:]), np.asarray(a).dtype), batch)
    arguments = jax.tree.map(jnp.asarray, (x0, y0, sized))
    leaves, structure = jax.tree.flatten(arguments)
    form = form_of(leaves)
    graph = loss.graph(structure, form)
    return {
        "arguments": [
            [n, [*f[0]], f[1]] for n, f in zip(trees.names(arguments), form, strict=True)
        ],
        "inputs": list(graph.inputs),
        "constants": [_number(a, arrays) for a in graph.constants],
        "nodes": [
            [
                node.operator,
                _encoded(node.arguments),
                {k: _encoded(v) for k, v in node.options.items()},
            ]
            for node in graph.nodes
        ],
        "output": graph.output.number,
    }


def _loss(
    name: str, stored: Any, arrays: list[np.ndarray]
) -> Callable[[PyTree, PyTree, PyTree], jax.Array]:
    """Return a loss that replays the stored graph for its arguments' form."""
    graphs = {_key(sample["arguments"]): _graph(sample, arrays) for sample in stored}

    def loss(x: PyTree, y: PyTree, batch: PyTree) -> jax.Array:
        arguments = jax.tree.map(jnp.asarray, (x, y, batch))
        leaves, named = jax.tree.leaves(arguments), trees.names(arguments)
        key = _key([n, f[0], f[1]] for n, f in zip(named, form_of(leaves), strict=True))
        if key in graphs:
            return replay(graphs[key], leaves)
        if any(a.ndim == 0 or len(a) == 1 for a in jax.tree.leaves(arguments[2])):
            raise UserError(
                f"The saved loss '{name}' was traced for other arguments than {_brief(key)}: save "
                "it with x0, y0 and a batch like these."
            )
        singles = jax.tree.map(lambda a: a[:, None], arguments[2])
        return jax.vmap(lambda sample: loss(x, y, sample))(singles).mean()

    loss.__name__ = name
    return loss


Key = tuple[tuple[str, tuple[int, ...], str], ...]


def _key(arguments: Any) -> Key:
    return tuple((name, tuple(shape), kind) for name, shape, kind in arguments)


def _brief(key: Key) -> str:
    shown = [f"{name} {list(shape)} {kind}" for name, shape, kind in key]
    return ", ".join(shown[:4]) + (", ..." if len(shown) > 4 else "")


def _graph(stored: Any, arrays: list[np.ndarray]) -> Graph:
    """Decode and validate a graph: operators are known, values are defined before their use."""
    inputs = [_kind(value) for value in stored["inputs"]]
    constants = [arrays[number] for number in stored["constants"]]
    defined, nodes = len(inputs) + len(constants), []
    for operator, arguments, options in stored["nodes"]:
        if operator not in TABLE:
            raise ValueError(f"unknown operator '{operator}'")
        decoded = {key: _decoded(value, defined) for key, value in options.items()}
        nodes.append(Node(operator, _decoded(arguments, defined), decoded))
        defined += 1
    return Graph(inputs, constants, nodes, _decoded({"value": stored["output"]}, defined))


def _encoded(argument: Any) -> Any:
    """Encode an argument of a node."""
    if isinstance(argument, Value):
        return {"value": argument.number}
    if isinstance(argument, Dtype):
        return {"dtype": argument.name}
    if isinstance(argument, list | tuple):
        return [_encoded(item) for item in argument]
    if isinstance(argument, float) and not np.isfinite(argument):
        return {"float": str(argument)}
    return argument


def _decoded(argument: Any, defined: int) -> Any:
    """Decode an argument of a node with this number of values before it."""
    if isinstance(argument, list):
        return [_decoded(item, defined) for item in argument]
    if not isinstance(argument, dict):
        return argument
    ((kind, value),) = argument.items()
    if kind == "dtype":
        return Dtype(_kind(value))
    if kind == "float":
        return float(value)
    if kind != "value" or not 0 <= value < defined:
        raise ValueError(f"unknown value {argument}")
    return Value(value)


def _kind(name: str) -> str:
    if name not in _KINDS:
        raise ValueError(f"unknown dtype '{name}'")
    return name


def _encoded_tree(tree: PyTree, arrays: list[np.ndarray]) -> Any:
    """Encode a tree of dictionaries, lists, tuples and arrays."""
    if isinstance(tree, OrderedDict):
        return {"ordered": [[key, _encoded_tree(child, arrays)] for key, child in tree.items()]}
    if isinstance(tree, Mapping):
        return {"items": {key: _encoded_tree(child, arrays) for key, child in tree.items()}}
    if isinstance(tree, list | tuple):
        if hasattr(tree, "_fields"):
            raise UserError("x0 and y0 must be of dictionaries, lists and tuples to be saved.")
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_encoded_tree(child, arrays) for child in tree]}
    return {"array": _number(np.asarray(tree), arrays)}


def _decoded_tree(encoded: Any, arrays: list[np.ndarray]) -> PyTree:
    ((kind, value),) = encoded.items()
    if kind == "items":
        return {key: _decoded_tree(child, arrays) for key, child in value.items()}
    if kind == "ordered":
        return OrderedDict((key, _decoded_tree(child, arrays)) for key, child in value)
    if kind == "array":
        return arrays[value]
    children = [_decoded_tree(child, arrays) for child in value]
    return children if kind == "list" else tuple(children)


def _number(array: np.ndarray, arrays: list[np.ndarray]) -> int:
    """Return the index of an array, adding it if it is new."""
    for i, stored in enumerate(arrays):
        same_form = stored.dtype == array.dtype and stored.shape == array.shape
        if same_form and stored.tobytes() == array.tobytes():
            return i
    arrays.append(array)
    return len(arrays) - 1


def _packed(array: np.ndarray) -> Any:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return [str(array.dtype), list(array.shape), data]


def _unpacked(stored: Any) -> np.ndarray:
    kind, shape, data = stored
    return np.frombuffer(base64.b64decode(data, validate=True), _kind(kind)).reshape(shape)
