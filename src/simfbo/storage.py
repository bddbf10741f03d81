"""Variables on disk: plain npz, one array per leaf, named by its path."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from simfbo.errors import UserError
from simfbo.problem import PyTree


def save_variables(file: Path, x: PyTree, y: PyTree) -> None:
    """Write x and y to an npz file, replacing it in one step."""
    leaves = jax.tree.leaves_with_path({"x": x, "y": y})
    temporary = file.with_name(file.name + ".tmp")
    with open(temporary, "wb") as out:
        np.savez(out, **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})  # pyright: ignore[reportArgumentType]
    temporary.replace(file)


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
    with np.load(file, allow_pickle=False) as saved:
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(like)]
        if sorted(names) != sorted(saved.files):
            raise UserError(f"{file} holds other variables than asked for: is it another task's?")
        found = jax.tree.unflatten(jax.tree.structure(like), [saved[name] for name in names])
    return found["x"], found["y"]
