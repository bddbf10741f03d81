"""Variables on disk: plain npz, one array per leaf, named by its path."""

import io
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from simfbo.core.gate import as_arrays
from simfbo.core.problem import PyTree
from simfbo.errors import UserError
from simfbo.runs.checkpoint import put


def save_variables(file: Path, x: PyTree, y: PyTree) -> None:
    """Write x and y to an npz file, replacing it in one step."""
    buffer = io.BytesIO()
    np.savez(buffer, **as_arrays({"x": x, "y": y}))  # pyright: ignore[reportArgumentType]
    put(file, buffer.getvalue())


def load_variables(file: str | Path, x: PyTree, y: PyTree) -> tuple[Any, Any]:
    """Return the saved (x, y), in the structure of the given ones.

    Args:
        file: what `save_variables` or `simfbo run` wrote (`variables.npz`).
        x: an upper variable of the same structure, as a task's `x0`.
        y: a lower variable of the same structure.

    Returns:
        The saved variables.
    """
    like = {"x": x, "y": y}
    try:
        with np.load(file, allow_pickle=False) as stored:
            saved = dict(stored)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{file} cannot be read as variables: {error}.") from None
    shapes = {name: np.shape(leaf) for name, leaf in as_arrays(like).items()}
    if shapes != {name: array.shape for name, array in saved.items()}:
        raise UserError(f"{file} holds other variables than asked for: is it another task's?")
    found = jax.tree.unflatten(jax.tree.structure(like), [saved[name] for name in shapes])
    return found["x"], found["y"]
