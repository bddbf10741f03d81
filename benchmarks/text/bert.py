"""BERT as a PyTorch module, with the names and the file format of published weights."""

import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

_KINDS = {"F32": np.float32, "I64": np.int64}


class Shape(NamedTuple):
    """The sizes of a BERT; by default those of all-MiniLM-L6-v2."""

    vocabulary: int = 30522
    positions: int = 512
    layers: int = 6
    width: int = 384
    heads: int = 12
    hidden: int = 1536


class Embeddings(nn.Module):
    """Words, positions and the one kind of sentence, added up."""

    def __init__(self, shape: Shape) -> None:
        """Take the sizes."""
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embeddings = nn.Embedding(shape.positions, shape.width)
        self.token_type_embeddings = nn.Embedding(2, shape.width)
        self.LayerNorm = nn.LayerNorm(shape.width, eps=1e-12)

    def forward(self, ids: Tensor) -> Tensor:
        """Return [N, L, width] for [N, L] numbers of pieces."""
        positions = self.position_embeddings.weight[: ids.shape[1]]
        found = self.word_embeddings(ids) + positions + self.token_type_embeddings.weight[0]
        return self.LayerNorm(found)


class Layer(nn.Module):
    """One layer: self-attention and two dense layers, each added to its input and normalised."""

    def __init__(self, shape: Shape) -> None:
        """Take the sizes."""
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.heads = shape.heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.out_norm = nn.LayerNorm(width, eps=1e-12)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.down_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, states: Tensor, mask: Tensor, asking: Tensor | None = None) -> Tensor:
        """Return a new state for every one of `asking`.

        Args:
            states: [N, L, width], which are attended to.
            mask: [N, L], 0 where nothing may attend to.
            asking: [N, K, width], the states that attend; all by default.
        """
        asking = states if asking is None else asking
        given = self.query(asking), self.key(states), self.value(states)
        found = F.scaled_dot_product_attention(*map(self._by_head, given), attn_mask=_bias(mask))
        asking = self.out_norm(asking + self.out(found.transpose(1, 2).flatten(2)))
        return self.down_norm(asking + self.down(F.gelu(self.up(asking))))

    def _by_head(self, states: Tensor) -> Tensor:
        return states.unflatten(2, (self.heads, -1)).transpose(1, 2)


class Bert(nn.Module):
    """Embeddings and layers."""

    def __init__(self, shape: Shape = Shape()) -> None:
        """Take the sizes."""
        super().__init__()
        self.embeddings = Embeddings(shape)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))

    def forward(self, ids: Tensor, mask: Tensor, layers: int | None = None) -> Tensor:
        """Return the states [N, L, width] after all layers, or after the first ones."""
        states = self.embeddings(ids)
        for layer in list(self.layers)[:layers]:
            states = layer(states, mask)
        return states


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean state [N, width] of each text, where its mask is 1."""
    weights = mask / mask.sum(1, keepdim=True)
    return (states * weights[..., None]).sum(1)


def _bias(mask: Tensor) -> Tensor:
    """Return what attention adds to its scores: a number so small that nothing is left."""
    return (mask[:, None, None, :] - 1) * 1e9


def read_safetensors(data: bytes) -> dict[str, np.ndarray]:
    """Return the arrays in a safetensors file: a length, a JSON header and the arrays' bytes."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + size :]
    return {
        name: np.frombuffer(body[slice(*one["data_offsets"])], _KINDS[one["dtype"]])
        .reshape(one["shape"])
        .copy()
        for name, one in header.items()
    }


_RENAMED = {
    "attention.self.": "",
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "out_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "down_norm",
    "encoder.layer.": "layers.",
}


def load(bert: Bert, arrays: Mapping[str, np.ndarray]) -> Bert:
    """Put published weights into a module; what it has no place for is left out."""
    state = {}
    for name, array in arrays.items():
        for theirs, ours in _RENAMED.items():
            name = name.replace(theirs, ours)
        state[name] = torch.from_numpy(array)
    bert.load_state_dict({name: state[name] for name in bert.state_dict()})
    return bert.eval().requires_grad_(False)
