"""PyTorch losses as JAX losses."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.problem import PyTree
from simfbo.errors import UserError
from simfbo.torch._graph import Form, Graph, form_of, replay
from simfbo.torch._order import in_order
from simfbo.torch._trace import trace


class TorchFunction:
    """A PyTorch function of trees, traced once per structure and shapes and replayed by JAX."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Take a function of trees of tensors that returns one tensor."""
        self.__wrapped__ = function  # identifies the loss in a resumed run
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._graphs: dict[tuple[Any, Form], Graph] = {}

    def __call__(self, *trees: PyTree) -> jax.Array:
        """Return the function's value for trees of arrays."""
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, in_order(trees)))
        return replay(self.graph(structure, form_of(leaves)), leaves)

    def graph(self, structure: Any, form: Form) -> Graph:
        """Return the graph for arguments of one structure and form, tracing it if it is new."""
        if (structure, form) not in self._graphs:
            traced = trace(self.__wrapped__, structure, form)
            self._graphs[structure, form] = traced._replace(
                constants=self._shared(traced.constants)
            )
        return self._graphs[structure, form]

    def _shared(self, constants: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Replace a new graph's constants by the equal arrays of earlier graphs.

        Raises:
            UserError: If a frozen weight has changed.
        """
        earlier = next((graph.constants for graph in self._graphs.values()), None)
        if earlier is None or [a.shape for a in earlier] != [a.shape for a in constants]:
            return constants  # of the first graph, or dependent on the shapes
        if any(a.tobytes() != b.tobytes() for a, b in zip(earlier, constants, strict=True)):
            raise UserError(
                f"'{self.__name__}' uses weights or buffers that have changed since it was first "
                "traced: create it again with from_torch."
            )
        return earlier


class TorchLoss(TorchFunction):
    """A PyTorch loss (x, y, batch) -> scalar."""

    def __call__(self, *trees: PyTree) -> jax.Array:
        """Return the loss for trees of arrays."""
        value = super().__call__(*trees)
        if value.ndim:
            raise UserError(
                f"'{self.__name__}' must return a scalar, it returns a tensor of shape "
                f"{list(value.shape)}: take its mean."
            )
        return value


def from_torch(loss: Callable[..., Any]) -> TorchLoss:
    """Convert a PyTorch loss to a JAX loss.

    `torch.export` traces it once per shape of its arguments into operators that JAX replays without
    PyTorch: derivatives of any order, every engine, Flower, checkpoints and the ledger work as for
    a loss written in JAX.

    The loss must be deterministic, and its control flow must not depend on values; if it cannot be
    traced, the error says what to change. Its arguments are trees of tensors: parameters for
    `torch.func.functional_call`, and a batch of samples, integers as int64. JAX sorts the keys of
    plain dictionaries, so a loss that depends on their order is rejected; ordered dictionaries,
    such as those of `parameters` and `split`, keep their order. Other tensors, such as a module's
    buffers and frozen weights, keep the values they have when the loss is traced.

    Args:
        loss: (x, y, batch) -> scalar tensor.

    Returns:
        The same function of JAX arrays.

    Example:
        >>> import numpy as np
        >>> loss = from_torch(lambda x, y, batch: ((batch @ y - x) ** 2).mean())
        >>> x, y, batch = np.float32(3), np.ones(3, "float32"), np.eye(3, dtype="float32")
        >>> float(loss(x, y, batch))
        4.0
    """
    return TorchLoss(loss)
