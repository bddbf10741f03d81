"""Comparison of a PyTorch loss and its derivatives with their replay in JAX."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import problem as products
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.core.trees import names
from simfbo.errors import UserError, require
from simfbo.torch._loss import TorchFunction, from_torch
from simfbo.torch._order import in_order
from simfbo.torch._trace import differentiable_attention


class Differences(NamedTuple):
    """The largest differences between JAX and PyTorch, relative to an array's largest entry.

    Attributes:
        value: of the loss.
        gradient: of its gradients with respect to x and y.
        hessian: of grad^2_yy v; None if PyTorch has no second derivative of an operator.
        mixed: of grad^2_xy v; None likewise.
    """

    value: float
    gradient: float
    hessian: float | None
    mixed: float | None


def check_loss(
    loss: Callable[..., Any], example: tuple[PyTree, PyTree, PyTree], *, tolerance: float = 1e-5
) -> Differences:
    """Compare a PyTorch loss and its derivatives in JAX with PyTorch's own (`torch.func`).

    Args:
        loss: (x, y, batch) -> scalar tensor, before or after `from_torch`.
        example: x, y and a batch, as arrays. Dictionaries are passed to PyTorch in their order.
        tolerance: the largest difference allowed; 1e-5 suits single precision.

    Returns:
        The differences.

    Raises:
        UserError: If one of them is larger than the tolerance.

    Example:
        >>> import numpy as np
        >>> def loss(x, y, batch):
        ...     return ((batch @ y).tanh() * x).mean()
        >>> example = np.float32(2), np.ones(3, "float32"), np.eye(3, dtype="float32")
        >>> max(check_loss(loss, example)) < 1e-6
        True
    """
    function = loss.__wrapped__ if isinstance(loss, TorchFunction) else loss
    arrays = jax.tree.map(lambda a: np.asarray(jnp.asarray(a)), in_order(example))
    plain = jax.tree.map(jnp.asarray, example)  # JAX sorts the keys
    rng = np.random.default_rng(0)
    v = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(a.dtype), plain[1])
    ours, theirs = _in_jax(function, plain, v), _in_torch(function, arrays, v)
    pairs = zip(ours, theirs, strict=True)
    differences = Differences(*(_difference(*pair) for pair in pairs))  # pyright: ignore[reportArgumentType]
    for name, difference in differences._asdict().items():
        if difference is not None and not difference <= tolerance:
            raise UserError(
                f"The {name} of '{from_torch(function).__name__}' differs between PyTorch and JAX "
                f"by {difference:.1e}: report the loss, and write it in JAX until then."
            )
    return differences


def _in_jax(function: Any, example: Any, v: PyTree) -> tuple[PyTree, ...]:
    """Compute value, gradients, Hessian product and mixed product."""
    replayed = from_torch(function)
    problem = BilevelProblem(replayed, replayed)

    @jax.jit
    def compute(x: PyTree, y: PyTree, v: PyTree, batch: PyTree) -> tuple[PyTree, ...]:
        value, gradient = jax.value_and_grad(replayed, (0, 1))(x, y, batch)
        hessian = products.hvp(problem, x, y, v, batch)
        return value, gradient, hessian, products.mixed(problem, x, y, v, batch)

    x, y, batch = example
    return compute(x, y, v, batch)


def _in_torch(function: Any, example: Any, v: PyTree) -> tuple[PyTree, ...]:
    """Compute the same by `torch.func`; None for unsupported products."""
    torch = require("torch", "torch")

    def tensors(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda a: _tensor(torch, a), tree)

    x, y, batch = map(tensors, example)
    direction = _by_name(tensors(v))

    def slope(x: Any, y: Any) -> Any:
        gradient = _by_name(torch.func.grad(function, 1)(x, y, batch))
        return sum((a * direction[name]).sum() for name, a in gradient.items())

    with warnings.catch_warnings(), differentiable_attention(torch):
        warnings.simplefilter("ignore")
        gradient, value = torch.func.grad_and_value(function, (0, 1))(x, y, batch)
        try:
            mixed, hessian = torch.func.grad(slope, (0, 1))(x, y)
        except (RuntimeError, NotImplementedError):
            mixed = hessian = None
    return value, gradient, hessian, mixed


def _tensor(torch: Any, array: np.ndarray) -> Any:
    tensor = torch.from_numpy(np.array(array))
    return tensor.long() if array.dtype == np.int32 else tensor


def _difference(ours: PyTree, theirs: PyTree) -> float | None:
    """Return the largest difference of two trees, relative to the array's largest entry."""
    if theirs is None:
        return None
    named = _by_name(theirs)
    pairs = [
        (np.asarray(a, float), np.asarray(named[name].detach().numpy(force=True), float))
        for name, a in _by_name(ours).items()
    ]
    largest = max((_largest(b) for _, b in pairs), default=0.0)
    return max((_gap(a, b, max(_largest(b), 1e-3 * largest)) for a, b in pairs), default=0.0)


def _by_name(tree: PyTree) -> dict[str, Any]:
    """Return a tree's leaves by name, independent of the order of dictionaries."""
    return dict(zip(names(tree), jax.tree.leaves(tree), strict=True))


def _largest(array: np.ndarray) -> float:
    return float(np.abs(np.nan_to_num(array)).max(initial=0.0))


def _gap(ours: np.ndarray, theirs: np.ndarray, scale: float) -> float:
    """Return the largest difference over a scale, without entries that are NaN in PyTorch."""
    gaps = np.where(np.isnan(theirs), 0.0, np.abs(ours - theirs))
    return float(np.where(np.isnan(gaps), np.inf, gaps).max(initial=0.0)) / (scale or 1.0)
