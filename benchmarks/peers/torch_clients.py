"""SimFBO rounds in PyTorch for any two losses: a loop over clients, and all clients in one vmap.

The loop is the straightforward version: `autograd.grad` with `create_graph`, one call per term of
the formulas, as benchmarks/round_speed has it for the networks. The other is what PyTorch offers
for speed: `torch.func` transforms, `vmap` over the clients, all second-order terms from one
gradient, and `torch.compile` for the whole round.

x, y and v are tuples of tensors; a batch is a tuple of tensors. One local step, no projection.
"""

from __future__ import annotations  # the compiler does not evaluate annotations of inner functions

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from problems import (
    STEPS,
    Case,
    Rounds,
    images,
    quadratic_task,
    reference_rounds,
    ridge_samples,
    sibling,
)
from torch import Tensor
from torch.func import grad, vmap

Params = tuple[Tensor, ...]
Batch = tuple[Tensor, ...]
Loss = Callable[[Params, Params, Batch], Tensor]
Point = tuple[Params, Params, Params]


def quadratic_losses() -> tuple[Loss, Loss]:
    """Return f and g of the quadratic, for one client's coefficients."""

    def upper(x: Params, y: Params, batch: Batch) -> Tensor:
        C, t, D, s = batch
        of_y, of_x = y[0] - t, x[0] - s
        return 0.5 * (of_y @ (C @ of_y) + of_x @ (D @ of_x))

    def lower(x: Params, y: Params, batch: Batch) -> Tensor:
        A, B, c = batch
        return 0.5 * y[0] @ (A @ y[0]) - y[0] @ (B @ x[0] + c)

    return upper, lower


def ridge_losses() -> tuple[Loss, Loss]:
    """Return f and g of the ridge, for one client's samples."""

    def upper(x: Params, y: Params, batch: Batch) -> Tensor:
        return 0.5 * (batch[0] @ y[0] - batch[1]).square().mean()

    def lower(x: Params, y: Params, batch: Batch) -> Tensor:
        return upper(x, y, batch) + 0.5 * (x[0].exp() * y[0].square()).sum()

    return upper, lower


def network_losses(model: str) -> tuple[Loss, Loss]:
    """Return f and g of the perceptron or the CNN, from benchmarks/round_speed."""
    reference = sibling("round_speed", "torch_reference")
    features = {"mlp": reference._mlp_features, "cnn": reference._cnn_features}[model]

    def upper(x: Params, y: Params, batch: Batch) -> Tensor:
        return reference._cross_entropy(features(x, batch[0]), y, batch[1])

    def lower(x: Params, y: Params, batch: Batch) -> Tensor:
        return reference._lower_loss(features, x, y, batch)

    return upper, lower


def loop_round(
    losses: tuple[Loss, Loss], weights: Tensor, steps: Sequence[float]
) -> Callable[[Point, Sequence[Batch], Sequence[Batch]], Point]:
    """Return the round that computes client after client."""

    def run_round(point: Point, lower: Sequence[Batch], upper: Sequence[Batch]) -> Point:
        totals = [[torch.zeros_like(leaf) for leaf in part] for part in point]
        for weight, mine, other in zip(weights.tolist(), lower, upper, strict=True):
            message = _term_by_term(losses, point, mine, other)
            for total, part in zip(totals, message, strict=True):
                for leaf, change in zip(total, part, strict=True):
                    leaf.add_(change, alpha=weight)
        return _step(point, totals, steps)

    return run_round


def vmap_round(
    losses: tuple[Loss, Loss], weights: Tensor, steps: Sequence[float]
) -> Callable[[Point, Batch, Batch], Point]:
    """Return the round that computes all clients at once; batches are stacked over clients."""
    upper_loss, lower_loss = losses

    def message(x: Params, y: Params, v: Params, lower: Batch, upper: Batch) -> Point:
        def product(x: Params, y: Params) -> tuple[Tensor, Params]:
            d_y = grad(lower_loss, 1)(x, y, lower)
            inner = sum((d * leaf).sum() for d, leaf in zip(d_y, v, strict=True))
            return inner - upper_loss(x, y, upper), d_y

        (minus_x, d_v), d_y = grad(product, (0, 1), has_aux=True)(x, y)
        return tuple(-leaf for leaf in minus_x), d_y, d_v

    messages = vmap(message, in_dims=(None, None, None, 0, 0))

    def run_round(point: Point, lower: Batch, upper: Batch) -> Point:
        totals = [
            [torch.tensordot(weights, leaf, 1) for leaf in part]
            for part in messages(*point, lower, upper)
        ]
        return _step(point, totals, steps)

    return run_round


def loop(case: Case) -> Rounds:
    """Return the rounds of the loop over clients."""
    if case["problem"] in ("mlp", "cnn"):
        return reference_rounds(case, "torch_reference")
    losses, lower, upper, start = _small(case)
    weights = torch.full((case["clients"],), 1 / case["clients"])
    run_round = loop_round(losses, weights, STEPS[case["problem"]])
    each = [list(zip(*part, strict=True)) for part in (lower, upper)]
    return _repeat(lambda point: run_round(point, *each), start)


def compiled(case: Case, notes: list[str]) -> Rounds:
    """Return the rounds of vmap and torch.compile; a note is added if compilation fails."""
    small = case["problem"] in ("quadratic", "ridge")
    losses, draw, start = fixed(case) if small else network(case)
    count = case["clients"] if small else case["cohort"]
    eager = vmap_round(losses, torch.full((count,), 1 / count), STEPS[case["problem"]])
    try:
        run_round = torch.compile(eager, fullgraph=True)
        run_round(start, *draw())
    except Exception as error:
        notes.append(f"torch.compile failed, so without it: {type(error).__name__}")
        run_round = eager
    return _repeat(lambda point: run_round(point, *draw()), start)


def _repeat(one: Callable[[Point], Point], start: Point) -> Rounds:
    """Return the function that applies a round a number of times."""

    def rounds(count: int) -> Point:
        point = start
        for _ in range(count):
            point = one(point)
        return point

    return rounds


def _term_by_term(
    losses: tuple[Loss, Loss], point: Point, lower: Batch, upper: Batch
) -> tuple[Params, Params, Params]:
    """Return a client's (d_x, d_y, d_v), term by term as the paper writes them."""
    x, y = (tuple(leaf.detach().requires_grad_() for leaf in part) for part in point[:2])
    d_y = torch.autograd.grad(losses[1](x, y, lower), y, create_graph=True)
    options: dict[str, Any] = {"retain_graph": True, "materialize_grads": True}
    hessian_v = torch.autograd.grad(d_y, y, grad_outputs=point[2], **options)
    cross_v = torch.autograd.grad(d_y, x, grad_outputs=point[2], **options)
    f = losses[0](x, y, upper)
    f_y = torch.autograd.grad(f, y, **options)
    f_x = torch.autograd.grad(f, x, allow_unused=True, materialize_grads=True)
    d_x = tuple(a - b for a, b in zip(f_x, cross_v, strict=True))
    d_v = tuple(a - b for a, b in zip(hessian_v, f_y, strict=True))
    return d_x, tuple(leaf.detach() for leaf in d_y), d_v


def _step(point: Point, totals: Sequence[Sequence[Tensor]], steps: Sequence[float]) -> Point:
    """Return the point after the server's steps."""
    x, y, v = (
        tuple(torch.sub(leaf, d, alpha=size) for leaf, d in zip(part, total, strict=True))
        for part, total, size in zip(point, totals, steps, strict=True)
    )
    return x, y, v


def _small(case: Case) -> tuple[tuple[Loss, Loss], Batch, Batch, Point]:
    """Return losses, stacked lower and upper batches, and the start of quadratic or ridge."""
    if case["problem"] == "ridge":
        losses, (lower, upper) = ridge_losses(), ridge_samples(case["clients"])
        sizes = 2 * (lower[0].shape[2],)
    else:
        task = quadratic_task(case)
        losses, sizes = quadratic_losses(), (len(task.x0), len(task.y0))
        lower, upper = (part.samples for part in (task.data.lower, task.data.upper))
    x, y = (torch.zeros(size) for size in sizes)
    tensors = [tuple(torch.tensor(np.asarray(leaf)) for leaf in part) for part in (lower, upper)]
    return losses, *tensors, ((x,), (y,), (y.clone(),))  # pyright: ignore[reportReturnType]


def fixed(case: Case) -> tuple[tuple[Loss, Loss], Callable, Point]:
    """Return losses, the draw that gives all clients' samples, and the start."""
    losses, lower, upper, start = _small(case)
    return losses, lambda: (lower, upper), start


def network(case: Case) -> tuple[tuple[Loss, Loss], Callable, Point]:
    """Return losses, the draw of a cohort and its batches, and the start."""
    round_speed, reference = (
        sibling("round_speed", name) for name in ("worker", "torch_reference")
    )
    model = case["problem"]
    pixels, labels, rows = images(case)
    shaped = pixels.reshape(len(pixels), -1) if model == "mlp" else pixels
    inputs, targets = reference._tensors(model, shaped, False), torch.as_tensor(labels).long()
    held = [torch.as_tensor(np.stack(part)) for part in zip(*rows, strict=True)]
    shape = (case["cohort"], round_speed.BATCH)

    def draw() -> tuple[Batch, ...]:
        cohort = torch.randperm(case["clients"])[: case["cohort"]]
        picks = [
            part[cohort[:, None], torch.randint(part.shape[1], shape)] for part in held
        ]  # fmt: skip
        return tuple((inputs[pick], targets[pick]) for pick in picks)

    x, y = round_speed.initial(model)
    enter = reference._enter_cnn if model == "cnn" else reference._enter
    head = reference._enter(y)
    return network_losses(model), draw, (enter(x), head, tuple(0 * leaf for leaf in head))
