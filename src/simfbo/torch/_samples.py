"""Samples from arrays, tensors, PyTorch datasets and loaders."""

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
    """Read the samples of a DataLoader, a Dataset, or a tuple of arrays that ends with labels.

    A loader or dataset is read once, from its first sample to its last.
    """
    torch = require("torch", "torch")
    if isinstance(source, torch.utils.data.DataLoader):
        samples = _joined([_arrays(torch, batch) for batch in source], np.concatenate)
    elif isinstance(source, torch.utils.data.TensorDataset):
        samples = _arrays(torch, source.tensors)
    elif isinstance(source, torch.utils.data.Dataset):
        samples = _joined([_arrays(torch, item) for item in _items(source)], np.stack)
    else:
        samples = _arrays(torch, source)
    return _labelled(samples)


def _items(dataset: Any) -> Any:
    """Iterate over a dataset's samples, by index if it has a length."""
    return (dataset[i] for i in range(len(dataset))) if hasattr(dataset, "__len__") else dataset


def _arrays(torch: Any, tree: Any) -> Any:
    """Convert tensors, numbers and images in a tree to arrays."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().numpy()
    if isinstance(tree, Mapping):
        return {key: _arrays(torch, child) for key, child in tree.items()}
    is_sequence = isinstance(tree, tuple) or (isinstance(tree, list) and _of_arrays(torch, tree))
    return tuple(_arrays(torch, child) for child in tree) if is_sequence else np.asarray(tree)


def _of_arrays(torch: Any, items: list[Any]) -> bool:
    """Check whether a list holds a batch's arrays, as from a loader, rather than numbers."""
    return bool(items) and isinstance(items[0], torch.Tensor | np.ndarray | Mapping)


def _joined(parts: Sequence[Any], join: Any) -> Any:
    """Join batches or samples."""
    if not parts:
        raise UserError("A client's dataset is empty: leave the client out.")
    try:
        return jax.tree.map(lambda *arrays: join(arrays), *parts)
    except ValueError:
        raise UserError(
            "A client's samples have different shapes: pad them to one, in the dataset or in the "
            "loader's collate_fn."
        ) from None


def _labelled(samples: Any) -> Labelled:
    """Split samples into inputs and labels: the last of a tuple, or the entry of that name."""
    if isinstance(samples, dict):
        name = next((name for name in _LABELS if name in samples), None)
        if name is None:
            raise UserError(f"Samples in a dictionary need 'labels', got {brief(list(samples))}.")
        inputs, labels = {key: a for key, a in samples.items() if key != name}, samples[name]
    elif isinstance(samples, tuple) and len(samples) > 1:
        inputs, labels = samples[0] if len(samples) == 2 else samples[:-1], samples[-1]
    else:
        raise UserError("Samples must be (inputs, labels), or a dictionary with 'labels'.")
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or (labels < 0).any():
        raise UserError(
            "Labels must be classes, one whole number from 0 per sample, got "
            f"{labels.dtype} of shape {list(labels.shape)}."
        )
    return Labelled(inputs, labels.astype(np.int32))
