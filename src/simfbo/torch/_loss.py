"""Losses written in PyTorch as losses in JAX."""

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
        self.__wrapped__ = function  # so that a resumed run can tell what it was started with
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._graphs: dict[tuple[Any, Form], Graph] = {}

    def __call__(self, *trees: PyTree) -> jax.Array:
        """Return the function's value for trees of arrays."""
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, in_order(trees)))
        return replay(self.graph(structure, form_of(leaves)), leaves)

    def graph(self, structure: Any, form: Form) -> Graph:
        """Return the graph for arguments of one structure and form, traced if it is new."""
        if (structure, form) not in self._graphs:
            found = trace(self.__wrapped__, structure, form)
            self._graphs[structure, form] = found._replace(constants=self._shared(found.constants))
        return self._graphs[structure, form]

    def _shared(self, constants: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Return a new graph's constants: the same arrays as in earlier ones, held once.

        Raises:
            UserError: If a frozen weight has changed since.
        """
        earlier = next((one.constants for one in self._graphs.values()), None)
        if earlier is None or [a.shape for a in earlier] != [a.shape for a in constants]:
            return constants  # the first ones, or such as depend on the shapes
        if any(a.tobytes() != b.tobytes() for a, b in zip(earlier, constants, strict=True)):
            raise UserError(
                f"'{self.__name__}' uses weights or buffers that have changed since it was first "
                "traced: make it anew with from_torch."
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
    """Return a loss written in PyTorch as a loss in JAX.

    `torch.export` traces it once per shape of its arguments into operators that JAX replays.
    Nothing of PyTorch is left after that: derivatives of any order, every engine, Flower,
    checkpoints and the ledger work as for a loss written in JAX.

    The loss must be deterministic, and its control flow must not depend on values; where it cannot
    be traced, a sentence says what to change. Its arguments are trees of tensors: parameters for
    `torch.func.functional_call`, and a batch of samples, whole numbers as int64. JAX sorts the keys
    of plain dictionaries, so a loss that depends on their order is refused; ordered dictionaries,
    such as those of `parameters` and `split`, arrive in the order they have. What else it uses,
    such as a module's buffers and frozen weights, is taken as it is when the loss is traced.

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
