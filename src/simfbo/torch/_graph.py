"""A traced function: a list of operators that JAX replays without PyTorch."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.errors import UserError, plain
from simfbo.torch.operators import TABLE

Form = tuple[tuple[tuple[int, ...], str], ...]  # shapes and dtypes of the inputs


class Value(NamedTuple):
    """A value of the graph; inputs, constants and results of nodes are numbered in this order."""

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
        constants: arrays inside the function: buffers, frozen weights.
        nodes: the operators, in order.
        output: the returned value.
    """

    inputs: Sequence[str]
    constants: Sequence[np.ndarray]
    nodes: Sequence[Node]
    output: Value


def replay(graph: Graph, inputs: Sequence[jax.Array]) -> jax.Array:
    """Compute a graph for JAX arrays, which may be traced."""
    values: list[Any] = [
        a.astype(jax.dtypes.canonicalize_dtype(kind))
        for a, kind in zip(inputs, graph.inputs, strict=True)
    ]
    values += map(jnp.asarray, graph.constants)

    def resolve(argument: Any) -> Any:
        if isinstance(argument, Value):
            return values[argument.number]
        if isinstance(argument, Dtype):
            return jax.dtypes.canonicalize_dtype(argument.name)
        return [resolve(item) for item in argument] if isinstance(argument, list) else argument

    for node in graph.nodes:
        arguments = [resolve(item) for item in node.arguments]
        options = {name: resolve(item) for name, item in node.options.items()}
        values.append(_result(node.operator, arguments, options))
    return values[graph.output.number]


def _result(operator: str, arguments: list[Any], options: dict[str, Any]) -> Any:
    """Apply an operator; raise a sentence if JAX rejects arguments that PyTorch accepted."""
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
