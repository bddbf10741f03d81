"""The order of dictionaries: JAX sorts the keys of plain ones and keeps that of ordered ones."""

import contextlib
import io
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax

from simfbo.core.problem import PyTree
from simfbo.errors import UserError

_CLOSE = 1e-5  # tolerance for sums in another order


def in_order(tree: PyTree) -> PyTree:
    """Convert plain dictionaries such that JAX keeps their order.

    Example:
        >>> jax.tree.leaves({"b": 1, "a": 2}), jax.tree.leaves(in_order({"b": 1, "a": 2}))
        ([2, 1], [1, 2])
    """
    return _rebuilt(
        tree, lambda dictionary: dictionary if _is_sorted(dictionary) else OrderedDict(dictionary)
    )


def require_no_order(
    torch: Any, function: Callable[..., Any], arguments: PyTree, name: str
) -> None:
    """Raise if a function depends on the order of plain dictionaries, which JAX changes.

    The function is called twice on random tensors, the second time with all keys reversed.

    Args:
        torch: PyTorch.
        function: of trees of tensors, to a tensor.
        arguments: of the function, for their shapes and types.
        name: the function's name in messages.
    """
    lengths: list[int] = []

    def reverse(original: dict[Any, Any]) -> dict[Any, Any]:
        lengths.extend([len(original)] * (len(original) > 1))
        return dict(reversed(original.items()))

    generator = torch.Generator().manual_seed(0)
    tensors = jax.tree.map(lambda a: _random(torch, a, generator), arguments)
    reversed_tensors = _rebuilt(tensors, reverse)
    if not lengths:
        return
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with torch.no_grad(), warnings.catch_warnings(), silent[0], silent[1]:
        warnings.simplefilter("ignore")
        try:
            value = function(*tensors)
        except Exception:  # undefined for these numbers, so nothing can be compared
            return
        try:
            same = torch.allclose(
                value, function(*reversed_tensors), _CLOSE, _CLOSE, equal_nan=True
            )
        except Exception:  # for example shapes that do not match
            same = False
    if not same:
        raise UserError(
            f"'{name}' depends on the order of a dictionary's keys, which JAX sorts in a plain "
            "dictionary: use those of simfbo.torch.parameters or split, or a "
            "collections.OrderedDict, for x0, y0 and samples."
        )


def _rebuilt(tree: PyTree, make: Callable[[dict[Any, Any]], Any]) -> PyTree:
    """Replace the plain dictionaries in a tree."""
    if type(tree) in (dict, OrderedDict):
        rebuilt = type(tree)((key, _rebuilt(part, make)) for key, part in tree.items())
        return make(rebuilt) if type(tree) is dict else rebuilt
    if isinstance(tree, list | tuple):
        parts = [_rebuilt(part, make) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def _is_sorted(dictionary: dict[Any, Any]) -> bool:
    keys = list(dictionary)
    return all(isinstance(key, str) for key in keys) and keys == sorted(keys)


def _random(torch: Any, like: Any, generator: Any) -> Any:
    """Draw numbers in (0.1, 0.9) of a tensor's shape and type; zeros for integers."""
    if not like.dtype.is_floating_point:
        return torch.zeros_like(like)
    return (0.8 * torch.rand(like.shape, generator=generator) + 0.1).to(like.dtype)
