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

_CLOSE = 1e-5  # sums in another order differ by less


def in_order(tree: PyTree) -> PyTree:
    """Return a tree in which JAX keeps the order of all dictionaries.

    Example:
        >>> jax.tree.leaves({"b": 1, "a": 2}), jax.tree.leaves(in_order({"b": 1, "a": 2}))
        ([2, 1], [1, 2])
    """
    return _rebuilt(tree, lambda found: found if _is_sorted(found) else OrderedDict(found))


def require_no_order(
    torch: Any, function: Callable[..., Any], arguments: PyTree, name: str
) -> None:
    """Raise if a function depends on the order of plain dictionaries: it would be JAX's.

    It is called twice on random tensors, the second time with all keys backwards.

    Args:
        torch: PyTorch.
        function: of trees of tensors, to a tensor.
        arguments: of the function, for their shapes and types.
        name: what messages call the function.
    """
    several: list[int] = []

    def backwards(found: dict[Any, Any]) -> dict[Any, Any]:
        several.extend([len(found)] * (len(found) > 1))
        return dict(reversed(found.items()))

    drawn = torch.Generator().manual_seed(0)
    given = jax.tree.map(lambda a: _random(torch, a, drawn), arguments)
    turned = _rebuilt(given, backwards)
    if not several:
        return
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with torch.no_grad(), warnings.catch_warnings(), silent[0], silent[1]:
        warnings.simplefilter("ignore")
        try:
            value = function(*given)
        except Exception:  # it is not defined for such numbers, so nothing can be compared
            return
        try:
            same = torch.allclose(value, function(*turned), _CLOSE, _CLOSE, equal_nan=True)
        except Exception:  # such as of shapes that do not fit
            same = False
    if not same:
        raise UserError(
            f"'{name}' depends on the order of a dictionary's keys, which JAX sorts in a plain "
            "dictionary: use those of simfbo.torch.parameters or split, or a "
            "collections.OrderedDict, for x0, y0 and samples."
        )


def _rebuilt(tree: PyTree, make: Callable[[dict[Any, Any]], Any]) -> PyTree:
    """Return a tree with its plain dictionaries replaced."""
    if type(tree) in (dict, OrderedDict):
        found = type(tree)((key, _rebuilt(part, make)) for key, part in tree.items())
        return make(found) if type(tree) is dict else found
    if isinstance(tree, list | tuple):
        parts = [_rebuilt(part, make) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def _is_sorted(found: dict[Any, Any]) -> bool:
    keys = list(found)
    return all(isinstance(key, str) for key in keys) and keys == sorted(keys)


def _random(torch: Any, like: Any, drawn: Any) -> Any:
    """Return numbers in (0.1, 0.9) of one's shape and type, zeros where they are whole."""
    if not like.dtype.is_floating_point:
        return torch.zeros_like(like)
    return (0.8 * torch.rand(like.shape, generator=drawn) + 0.1).to(like.dtype)
