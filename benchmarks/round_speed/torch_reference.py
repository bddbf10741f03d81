"""A SimFBO round in plain PyTorch, written the way researchers write it.

A Python loop over the clients and over their local steps; each step builds a graph with
`torch.autograd.grad(..., create_graph=True)` and differentiates it once more, a call per term of
the formulas. The lower batch serves all products with g and the upper batch all gradients of f.
With `merged=True` it uses the library's own trick of one backward pass for all second-order terms.

The state goes in and out in the layout that every implementation of this benchmark shares (dense
weights [in, out], kernels [kh, kw, cin, cout], features flattened from [h, w, c]); inside, it is in
PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

REGULARISATION = 0.001

Params = tuple[Tensor, ...]
State = tuple[Sequence, Sequence, Sequence]  # (x, y, v), each a sequence of arrays
Rows = tuple[np.ndarray, np.ndarray]  # (lower rows, upper rows)
Draw = Callable[[int, int], Rows]
Round = Callable[[State, Sequence[int], np.random.Generator], State]


def make_round(
    model: str,
    images: np.ndarray,
    labels: np.ndarray,
    clients_rows: Sequence[Rows],
    *,
    tau: np.ndarray,
    batch_size: int,
    steps: tuple[float, float, float],
    server_steps: tuple[float, float, float] | None = None,
    draw: Draw | None = None,
    channels_last: bool = False,
    merged: bool = False,
) -> Round:
    """Returns a function that runs one SimFBO round (a = 1, equal client weights, no projection).

    Args:
        model: "mlp" (784-200-10, images [n, 784]) or "cnn" (LeNet-5 shape, images [n, 32, 32, 3]).
        images: All images, uint8 (scaled to [0, 1] here) or floating point.
        labels: All labels, integers [n].
        clients_rows: Per client, the rows of its lower and of its upper images.
        tau: Local steps of each client.
        batch_size: Images in each of the two batches of a step.
        steps: Local step sizes (y, v, x).
        server_steps: Server step sizes (y, v, x); the local ones unless given.
        draw: `draw(client, step)` returns the (lower, upper) rows of a batch in place of the rng.
        channels_last: Whether the CNN's images are kept in the channels_last memory format.
        merged: Whether the second-order terms come from one backward pass, as in the library,
            instead of one call of `autograd.grad` per term of the formulas.
    """
    pixels, targets = _tensors(model, images, channels_last), torch.as_tensor(labels).long()
    features = {"mlp": _mlp_features, "cnn": _cnn_features}[model]
    find = _merged_directions if merged else _directions
    enter, leave = (_enter_cnn, _leave_cnn) if model == "cnn" else (_enter, tuple)

    def run_round(state: State, cohort_ids: Sequence[int], rng: np.random.Generator) -> State:
        pick = draw or _random_draw(clients_rows, batch_size, rng)
        start = (enter(state[0]), _enter(state[1]), _enter(state[2]))
        totals = tuple(tuple(torch.zeros_like(leaf) for leaf in part) for part in start)
        for client in cohort_ids:
            x, y, v = start
            for step in range(int(tau[client])):
                lower, upper = (
                    (pixels[rows], targets[rows])
                    for rows in map(torch.as_tensor, pick(client, step))
                )
                directions = find(features, x, y, v, lower, upper)
                x, y, v = _descend((x, y, v), directions, steps)
                _accumulate(totals, directions)
        scaled = tuple(size / len(cohort_ids) for size in server_steps or steps)
        x, y, v = _descend(start, totals, scaled)
        return leave(x), y, v

    return run_round


def _directions(
    features: Callable[[Params, Tensor], Tensor],
    x: Params,
    y: Params,
    v: Params,
    lower: tuple[Tensor, Tensor],
    upper: tuple[Tensor, Tensor],
) -> tuple[Params, Params, Params]:
    """Returns (d_x, d_y, d_v) of one local step, term by term as the paper writes them."""
    x = tuple(leaf.detach().requires_grad_() for leaf in x)
    y = tuple(leaf.detach().requires_grad_() for leaf in y)
    g = _lower_loss(features, x, y, lower)
    f = _cross_entropy(features(x, upper[0]), y, upper[1])
    d_y = torch.autograd.grad(g, y, create_graph=True)
    hessian_v = torch.autograd.grad(d_y, y, grad_outputs=v, retain_graph=True)
    cross_v = torch.autograd.grad(d_y, x, grad_outputs=v)
    f_y = torch.autograd.grad(f, y, retain_graph=True)
    f_x = torch.autograd.grad(f, x)
    d_v = tuple(a - b for a, b in zip(hessian_v, f_y, strict=True))
    d_x = tuple(a - b for a, b in zip(f_x, cross_v, strict=True))
    return d_x, tuple(d.detach() for d in d_y), d_v


def _merged_directions(
    features: Callable[[Params, Tensor], Tensor],
    x: Params,
    y: Params,
    v: Params,
    lower: tuple[Tensor, Tensor],
    upper: tuple[Tensor, Tensor],
) -> tuple[Params, Params, Params]:
    """Returns (d_x, d_y, d_v) of one local step, from one graph."""
    x = tuple(leaf.detach().requires_grad_() for leaf in x)
    y = tuple(leaf.detach().requires_grad_() for leaf in y)
    g = _lower_loss(features, x, y, lower)
    f = _cross_entropy(features(x, upper[0]), y, upper[1])
    d_y = torch.autograd.grad(g, y, create_graph=True)
    scalar = sum((d * w).sum() for d, w in zip(d_y, v, strict=True)) - f
    grads = torch.autograd.grad(scalar, y + x)
    d_x = tuple(-grad for grad in grads[len(y) :])
    return d_x, tuple(d.detach() for d in d_y), grads[: len(y)]


def _lower_loss(
    features: Callable[[Params, Tensor], Tensor],
    x: Params,
    y: Params,
    batch: tuple[Tensor, Tensor],
) -> Tensor:
    """Returns g on a batch."""
    ridge = sum(leaf.square().sum() for leaf in y)
    return _cross_entropy(features(x, batch[0]), y, batch[1]) + REGULARISATION / 2 * ridge


def _cross_entropy(features: Tensor, y: Params, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the linear head y on the features."""
    return F.cross_entropy(torch.addmm(y[1], features, y[0]), targets)


def _mlp_features(x: Params, images: Tensor) -> Tensor:
    """Returns the hidden layer of the 784-200-10 perceptron."""
    return torch.addmm(x[1], images, x[0]).relu()


def _cnn_features(x: Params, images: Tensor) -> Tensor:
    """Returns the 84 features of the LeNet-5-shaped network."""
    hidden = F.max_pool2d(F.conv2d(images, x[0], x[1]).relu(), 2)
    hidden = F.max_pool2d(F.conv2d(hidden, x[2], x[3]).relu(), 2)
    hidden = torch.addmm(x[5], hidden.flatten(1), x[4]).relu()
    return torch.addmm(x[7], hidden, x[6]).relu()


def _descend(
    point: tuple[Params, ...], directions: tuple[Params, ...], steps: tuple[float, ...]
) -> tuple[Params, Params, Params]:
    """Returns (x, y, v) moved against their directions; `steps` is in the order (y, v, x)."""
    sizes = (steps[2], steps[0], steps[1])
    x, y, v = (
        tuple(torch.sub(leaf, d, alpha=size) for leaf, d in zip(leaves, ds, strict=True))
        for leaves, ds, size in zip(point, directions, sizes, strict=True)
    )
    return x, y, v


def _accumulate(totals: tuple[Params, ...], directions: tuple[Params, ...]) -> None:
    """Adds the directions to the running totals in place."""
    for total, direction in zip(totals, directions, strict=True):
        for leaf, change in zip(total, direction, strict=True):
            leaf.add_(change)


def _random_draw(clients_rows: Sequence[Rows], batch_size: int, rng: np.random.Generator) -> Draw:
    """Returns a draw that samples each batch uniformly, with replacement."""

    def draw(client: int, step: int) -> Rows:
        del step
        lower, upper = clients_rows[client]
        return rng.choice(lower, batch_size), rng.choice(upper, batch_size)

    return draw


def _tensors(model: str, images: np.ndarray, channels_last: bool) -> Tensor:
    """Returns the images as float32, flat for the perceptron and NCHW for the CNN."""
    scale = 255 if images.dtype == np.uint8 else 1
    pixels = torch.as_tensor(np.asarray(images, np.float32) / scale)
    if model == "mlp":
        return pixels.reshape(len(pixels), -1)
    pixels = pixels.permute(0, 3, 1, 2)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return pixels.contiguous(memory_format=layout)


def _enter(leaves: Sequence) -> Params:
    """Returns the arrays as float32 tensors."""
    return tuple(torch.as_tensor(np.asarray(leaf), dtype=torch.float32) for leaf in leaves)


def _enter_cnn(leaves: Sequence) -> Params:
    """Returns x in PyTorch's layout: kernels OIHW, features flattened from [c, h, w]."""
    k1, b1, k2, b2, w, *rest = _enter(leaves)
    side = round((len(w) // len(b2)) ** 0.5)
    w = w.reshape(side, side, len(b2), -1).permute(2, 0, 1, 3).reshape(len(w), -1)
    k1, k2 = (k.permute(3, 2, 0, 1).contiguous() for k in (k1, k2))
    return (k1, b1, k2, b2, w, *rest)


def _leave_cnn(leaves: Params) -> Params:
    """Returns x in the shared layout: the inverse of `_enter_cnn`."""
    k1, b1, k2, b2, w, *rest = leaves
    side = round((len(w) // len(b2)) ** 0.5)
    w = w.reshape(len(b2), side, side, -1).permute(1, 2, 0, 3).reshape(len(w), -1)
    k1, k2 = (k.permute(2, 3, 1, 0).contiguous() for k in (k1, k2))
    return (k1, b1, k2, b2, w, *rest)
