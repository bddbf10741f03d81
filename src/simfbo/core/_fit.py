"""Whether a loss fits the variables and samples that it is called with; in words where not."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from simfbo.errors import UserError, plain

_MOST = 6  # sizes that an axis is tried with


def called(loss: Callable[..., Any], x: Any, y: Any, batch: Any) -> Any:
    """Return `loss(x, y, batch)`; raise with the shapes if it fails or returns no single number.

    It costs nothing in a compiled program: all of this happens while the loss is traced.
    """
    try:
        value = loss(x, y, batch)
    except UserError:
        raise
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(_sentence(loss, x, y, batch, error)) from error
    if not isinstance(value, int | float) and getattr(value, "shape", None) != ():
        got = f"shape {value.shape}" if hasattr(value, "shape") else type(value).__name__
        raise UserError(f"{_name(loss)} must return one number, a mean over samples: got {got}.")
    return value


def _sentence(loss: Callable[..., Any], x: Any, y: Any, batch: Any, error: Exception) -> str:
    """Return why a loss fails, with the shapes it was called with, and with one that fits."""
    x, y, batch = (jax.tree.map(_shape, tree) for tree in (x, y, batch))
    why = plain(str(error).split("\n")[0].rstrip("."), 200)
    if isinstance(error, jax.errors.JAXTypeError):
        why += " (write it with jax.numpy, on arrays throughout)"
    shapes = f"x0 is {_words(x)}, y0 {_words(y)}, the samples {_words(batch)}"
    return f"{_name(loss)} fails: {why}. Here {shapes}{_fitting(loss, x, y, batch)}."


def _fitting(loss: Callable[..., Any], x: Any, y: Any, batch: Any) -> str:
    """Return in words which other shape of y0, or else of x0, fits; nothing if none or many do."""
    sizes = sorted({n for leaf in jax.tree.leaves((x, y, batch)) for n in leaf.shape if n > 1})
    for name, given in (("y0", y), ("x0", x)):
        for shapes in _candidates(given, sizes[:_MOST]):
            at = [(x, one) if name == "y0" else (one, y) for one in shapes]
            fits = [one.shape for one, pair in zip(shapes, at, strict=True)
                    if _works(loss, *pair, batch)]  # fmt: skip
            if len(fits) == 1:
                return f": {name} must be of shape {fits[0]}"
    return ""


def _candidates(given: Any, sizes: list[int]) -> Iterator[list[jax.ShapeDtypeStruct]]:
    """Yield arrays to try in place of one, first those with as many axes; none for a pytree."""
    if isinstance(given, jax.ShapeDtypeStruct):
        for axes in dict.fromkeys((min(given.ndim, 2), 1, 2)):
            shapes = product(sizes, repeat=axes)
            yield [jax.ShapeDtypeStruct(shape, given.dtype) for shape in shapes]


def _works(loss: Callable[..., Any], x: Any, y: Any, batch: Any) -> bool:
    """Return whether a loss gives a number for these shapes."""
    try:
        return jax.eval_shape(loss, x, y, batch).shape == ()
    except Exception:  # a loss of yours can raise anything
        return False


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def _words(tree: Any) -> str:
    """Return shapes and types as JAX writes them."""
    return plain(str(jax.tree.map(lambda leaf: _Shown(leaf), tree)), 150)


class _Shown:
    """A leaf that shows itself as a type and a shape."""

    def __init__(self, leaf: Any) -> None:
        self._text = f"{leaf.dtype}{list(leaf.shape)}"

    def __repr__(self) -> str:
        return self._text


def _name(loss: Callable[..., Any]) -> str:
    """Return what to call a loss."""
    name = getattr(loss, "__name__", "<lambda>")
    return "A loss" if name == "<lambda>" else f"The loss '{name}'"
