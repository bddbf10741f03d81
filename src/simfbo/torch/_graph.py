"""A traced function: operators in order, which JAX replays without PyTorch."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.errors import UserError, plain
from simfbo.torch.operators import TABLE

Form = tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of every input


class Value(NamedTuple):
    """A value of the graph: its inputs, its constants and its nodes' results are numbered."""

    number: int


class Dtype(NamedTuple):
    """A dtype among a node's arguments."""

    name: str


class Node(NamedTuple):
    """One operator.

    Attributes:
        operator: its name in `TABLE`.
        arguments: numbers, texts, None, `Value`, `Dtype` and lists of them.
        options: arguments by name.
    """

    operator: str
    arguments: Sequence[Any]
    options: Mapping[str, Any]


class Graph(NamedTuple):
    """A function of arrays as a list of operators.

    Attributes:
        inputs: the inputs' dtypes.
        constants: arrays that the function holds: buffers, frozen weights.
        nodes: the operators, in order.
        output: the value it returns.
    """

    inputs: Sequence[str]
    constants: Sequence[np.ndarray]
    nodes: Sequence[Node]
    output: Value


def replay(graph: Graph, inputs: Sequence[jax.Array]) -> jax.Array:
    """Return the value of a graph for JAX arrays, which may be traced."""
    values: list[Any] = [
        a.astype(jax.dtypes.canonicalize_dtype(kind))
        for a, kind in zip(inputs, graph.inputs, strict=True)
    ]
    values += map(jnp.asarray, graph.constants)

    def resolve(given: Any) -> Any:
        if isinstance(given, Value):
            return values[given.number]
        if isinstance(given, Dtype):
            return jax.dtypes.canonicalize_dtype(given.name)
        return [resolve(one) for one in given] if isinstance(given, list) else given

    for node in graph.nodes:
        arguments = [resolve(one) for one in node.arguments]
        options = {name: resolve(one) for name, one in node.options.items()}
        values.append(_result(node.operator, arguments, options))
    return values[graph.output.number]


def _result(operator: str, arguments: list[Any], options: dict[str, Any]) -> Any:
    """Return an operator's result; raise a sentence if JAX refuses what PyTorch accepted."""
    try:
        return TABLE[operator](*arguments, **options)
    except UserError:
        raise
    except Exception as error:  # jax.numpy raises many kinds
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"PyTorch's operator {operator} cannot be computed in JAX for these arguments "
            f"({plain(first, 150)}): write that part with other operators, or the loss in JAX."
        ) from error


def form_of(leaves: Sequence[jax.Array]) -> Form:
    """Return the shapes and dtypes of arrays."""
    return tuple((tuple(a.shape), str(a.dtype)) for a in leaves)
