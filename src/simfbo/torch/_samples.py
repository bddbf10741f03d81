"""Samples from where PyTorch users have them: arrays, tensors, datasets and loaders."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from simfbo.core.problem import PyTree
from simfbo.errors import UserError, brief, require

_LABELS = ("labels", "label")


class Labelled(NamedTuple):
    """Inputs with class labels.

    Attributes:
        inputs: an array, or a tuple or dictionary of them: the module's arguments.
        labels: [N], from 0.
    """

    inputs: PyTree
    labels: np.ndarray


def samples_of(source: Any) -> Labelled:
    """Return the samples in a DataLoader, a Dataset, or a tuple of arrays that ends with labels.

    A loader or dataset is read once, from its first sample to its last.
    """
    torch = require("torch", "torch")
    if isinstance(source, torch.utils.data.DataLoader):
        found = _joined([_arrays(torch, batch) for batch in source], np.concatenate)
    elif isinstance(source, torch.utils.data.TensorDataset):
        found = _arrays(torch, source.tensors)
    elif isinstance(source, torch.utils.data.Dataset):
        found = _joined([_arrays(torch, one) for one in _items(source)], np.stack)
    else:
        found = _arrays(torch, source)
    return _labelled(found)


def _items(dataset: Any) -> Any:
    """Return a dataset's samples one by one, whether it has a length or is iterated."""
    return (dataset[i] for i in range(len(dataset))) if hasattr(dataset, "__len__") else dataset


def _arrays(torch: Any, tree: Any) -> Any:
    """Return a tree with tensors, numbers and images as arrays."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().numpy()
    if isinstance(tree, Mapping):
        return {key: _arrays(torch, one) for key, one in tree.items()}
    several = isinstance(tree, tuple) or (isinstance(tree, list) and _of_arrays(torch, tree))
    return tuple(_arrays(torch, one) for one in tree) if several else np.asarray(tree)


def _of_arrays(torch: Any, given: list[Any]) -> bool:
    """Return whether a list holds a batch's arrays, as a loader's do, rather than numbers."""
    return bool(given) and isinstance(given[0], torch.Tensor | np.ndarray | Mapping)


def _joined(parts: Sequence[Any], join: Any) -> Any:
    """Return batches or samples together."""
    if not parts:
        raise UserError("A client's dataset is empty: leave the client out.")
    try:
        return jax.tree.map(lambda *arrays: join(arrays), *parts)
    except ValueError:
        raise UserError(
            "A client's samples have different shapes: pad them to one, in the dataset or in the "
            "loader's collate_fn."
        ) from None


def _labelled(found: Any) -> Labelled:
    """Return inputs and labels; the labels are the last of a tuple, or named so."""
    if isinstance(found, dict):
        name = next((name for name in _LABELS if name in found), None)
        if name is None:
            raise UserError(f"Samples in a dictionary need 'labels', got {brief(list(found))}.")
        inputs, labels = {key: a for key, a in found.items() if key != name}, found[name]
    elif isinstance(found, tuple) and len(found) > 1:
        inputs, labels = found[0] if len(found) == 2 else found[:-1], found[-1]
    else:
        raise UserError("Samples must be (inputs, labels), or a dictionary with 'labels'.")
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or (labels < 0).any():
        raise UserError(
            "Labels must be classes, one whole number from 0 per sample, got "
            f"{labels.dtype} of shape {list(labels.shape)}."
        )
    return Labelled(inputs, labels.astype(np.int32))
