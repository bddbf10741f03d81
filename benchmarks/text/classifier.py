"""The two losses in PyTorch: which desks to trust, and a classifier with adapters.

    g_i = mean of sigmoid(x_i) loss(y, text) + lambda/2 ||y - y0||^2   on what desk i labelled,
    f_i = mean loss(y, text)                                           on a few trusted texts.

y are low-rank adapters of the model's last layer (Hu et al. 2022, LoRA) and a linear head, or the
head alone. All else is frozen.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from bert import Layer, pooled
from torch import Tensor, nn
from torch.nn import functional as F

from simfbo import BilevelProblem
from simfbo.torch import SplitModule, from_torch, split

ADAPTED = ("query", "value", "up", "down")


class LowRank(nn.Module):
    """A dense layer with a low-rank change of its weights, which is zero at first."""

    def __init__(self, dense: nn.Linear, rank: int) -> None:
        """Take the layer and the rank."""
        super().__init__()
        self.dense = dense
        self.first = nn.Parameter(torch.randn(rank, dense.in_features) / dense.in_features**0.5)
        self.second = nn.Parameter(torch.zeros(dense.out_features, rank))

    def forward(self, states: Tensor) -> Tensor:
        """Return the layer's output and that of the change, added up."""
        return self.dense(states) + states @ self.first.T @ self.second.T


class Classifier(nn.Module):
    """The last layer of a BERT with adapters, and a linear head.

    The layer reads each text from one place, the mean of its states, rather than from all of them:
    a fifth of the cost.
    """

    def __init__(self, layer: Layer, rank: int) -> None:
        """Take the layer, which is copied, and the adapters' rank."""
        super().__init__()
        self.layer = copy.deepcopy(layer)
        self.head = Head(self.layer.query.in_features)
        for name in ADAPTED:
            setattr(self.layer, name, LowRank(getattr(self.layer, name), rank))

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the scores [N, 2] of texts with states [N, L, width]."""
        found = self.layer(states, mask, pooled(states, mask)[:, None])
        return self.head(found[:, 0], mask)


class Head(nn.Linear):
    """A linear head that starts at zero."""

    def __init__(self, width: int) -> None:
        """Take the width of its inputs."""
        super().__init__(width, 2)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Return the scores [N, 2] of texts with embeddings [N, width]."""
        return super().forward(embeddings)


class Losses(NamedTuple):
    """A problem and where it starts.

    Attributes:
        problem: the two losses, as JAX sees them.
        module: the model, (features, mask) -> scores, in PyTorch.
        y0: adapters and head at first, by name.
    """

    problem: BilevelProblem
    module: nn.Module
    y0: dict[str, Any]


def adapters(layer: Layer, rank: int, seed: int) -> SplitModule:
    """Return the classifier of which adapters and head are learnt."""
    torch.manual_seed(seed)
    model = Classifier(layer, rank).eval()
    return split(model, upper=(), lower=("*.first", "*.second", "head.*"))


def head(width: int) -> SplitModule:
    """Return a linear classifier of embeddings, all of which is learnt."""
    return split(Head(width), upper=())


def losses(model: SplitModule, penalty: float) -> Losses:
    """Build the two losses on batches (features, mask, label, client)."""
    start = {name: torch.from_numpy(a) for name, a in model.y.items()}

    def lower(x: Tensor, y: dict[str, Tensor], batch: Sequence[Tensor]) -> Tensor:
        features, mask, label, client = batch
        found = F.cross_entropy(model({}, y, features, mask), label, reduction="none")
        distance = sum(((y[name] - start[name]) ** 2).sum() for name in start)
        return (torch.sigmoid(x)[client] * found).mean() + 0.5 * penalty * distance

    def upper(x: Tensor, y: dict[str, Tensor], batch: Sequence[Tensor]) -> Tensor:
        features, mask, label, _ = batch
        return F.cross_entropy(model({}, y, features, mask), label)

    return Losses(BilevelProblem(from_torch(upper), from_torch(lower)), model.module, model.y)
