"""A FedNest iteration in plain PyTorch, written the way researchers write it.

A Python loop over the clients and over their batches; first derivatives by `torch.autograd.grad`,
products of second order by `create_graph=True` and one more call. K = 1 and all clients weigh the
same. Where batches come from is a `Reader`, of which there are four:

    pictures    DataLoaders over a Dataset that takes every sample through a PIL image and turns it
                into floats, which is what torchvision's MNIST and the usual transforms do and the
                published code reads; every oracle is a pass over all of the client's samples
    loader      the same without PIL
    tensors     the same passes, cut out of one tensor of floats in memory
    minibatch   from the tensor too, but every oracle is one random batch

Weights are [in, out]; the state (x, y, v) goes in as arrays and comes out as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.autograd import grad
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

REGULARISATION = 0.001
LOWER, UPPER = 0, 1

Params = tuple[Tensor, ...]
Batch = tuple[Tensor, Tensor]  # (images, labels)
State = tuple[Sequence, Sequence, Sequence]  # (x, y, v), each a sequence of arrays
Rows = tuple[np.ndarray, np.ndarray]  # (lower rows, upper rows)
Oracle = Callable[[Batch], Params]
Product = Callable[[Params], Params]


class Reader(NamedTuple):
    """Where batches come from.

    Attributes:
        answer: (client, level) -> the batches that an oracle averages over.
        local: (client, level) -> batches for local steps, without end.
    """

    answer: Callable[[int, int], Iterable[Batch]]
    local: Callable[[int, int], Iterator[Batch]]


class Pixels(NamedTuple):
    """The samples of everybody: bytes [n, 784], labels [n], and how pixels are standardised."""

    images: np.ndarray
    labels: np.ndarray
    mean: float
    deviation: float


class ClientSamples(Dataset):
    """One level of one client's samples, converted one at a time."""

    def __init__(self, pixels: Pixels, rows: np.ndarray, read: Callable) -> None:
        self.pixels, self.rows, self.read = pixels, rows, read
        self.factor = 1 / pixels.deviation

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        row = self.rows[place]
        image = self.read(self.pixels.images[row]).float()
        return image.sub_(self.pixels.mean).mul_(self.factor), int(self.pixels.labels[row])


def pictures(pixels: Pixels, clients_rows: Sequence[Rows], batch_size: int) -> Reader:
    """Return the reader with DataLoaders and PIL images."""

    def read(image: np.ndarray) -> Tensor:
        picture = Image.fromarray(image.reshape(28, 28))
        return torch.from_numpy(np.array(picture)).view(-1)

    return loader(pixels, clients_rows, batch_size, read)


def loader(
    pixels: Pixels,
    clients_rows: Sequence[Rows],
    batch_size: int,
    read: Callable[[np.ndarray], Tensor] = torch.from_numpy,
) -> Reader:
    """Return the reader that passes over the samples with DataLoaders, made once per client."""

    def loaders(shuffle: bool) -> list[list[DataLoader]]:
        return [
            [DataLoader(ClientSamples(pixels, part, read), batch_size, shuffle) for part in rows]
            for rows in clients_rows
        ]

    ordered, shuffled = loaders(False), loaders(True)

    def local(client: int, level: int) -> Iterator[Batch]:
        while True:
            yield from shuffled[client][level]

    return Reader(lambda client, level: ordered[client][level], local)


def tensors(pixels: Pixels, clients_rows: Sequence[Rows], batch_size: int) -> Reader:
    """Return the reader that passes over the samples by indexing one tensor of floats."""
    images, labels, held = _in_memory(pixels, clients_rows)

    def cut(rows: Tensor) -> Iterator[Batch]:
        return ((images[part], labels[part]) for part in rows.split(batch_size))

    def local(client: int, level: int) -> Iterator[Batch]:
        rows = held[client][level]
        while True:
            yield from cut(rows[torch.randperm(len(rows))])

    return Reader(lambda client, level: cut(held[client][level]), local)


def minibatch(pixels: Pixels, clients_rows: Sequence[Rows], batch_size: int) -> Reader:
    """Return the reader whose every answer is one batch, drawn with replacement."""
    images, labels, held = _in_memory(pixels, clients_rows)

    def draw(client: int, level: int) -> Batch:
        rows = held[client][level]
        part = rows[torch.randint(len(rows), (batch_size,))]
        return images[part], labels[part]

    def local(client: int, level: int) -> Iterator[Batch]:
        while True:
            yield draw(client, level)

    return Reader(lambda client, level: [draw(client, level)], local)


def make_iteration(
    read: Reader,
    *,
    steps: tuple[float, float, float],
    local_steps: int,
    terms: int,
    released: bool,
    cancelling: bool = False,
) -> Callable[[State, Sequence[int]], State]:
    """Return the function (state, cohort's ids) -> state after one FedNest iteration.

    Args:
        read: where batches come from.
        steps: step sizes (y, v, x).
        local_steps: tau, of y; of x too unless `released`.
        terms: N, the number of Hessian products.
        released: sum the series of the published code, in which every client recurses on its own
            Hessian and takes its N products from the graph of one pass, kept in memory; and take
            one local step on x.
        cancelling: compute the two gradients of f that cancel in that one step, as published.
    """
    step_y, step_v, step_x = steps

    def iterate(state: State, ids: Sequence[int]) -> State:
        x, y = _enter(state[0]), _enter(state[1])

        # FedInn
        q = _mean(_average(_lower_grad(x, y), read.answer(i, LOWER)) for i in ids)

        def lower(y: Params, batch: Batch) -> Params:
            return _lower_grad(x, y)(batch)

        y = _mean(_svrg(lower, y, q, read.local(i, LOWER), local_steps, step_y) for i in ids)

        # FedIHGP
        p = _mean(_average(_upper_grad_y(x, y), read.answer(i, UPPER)) for i in ids)
        if released:
            v = _released_series(p, [_kept_product(read, x, y, i) for i in ids], step_x, terms)
        else:
            v = _neumann_series(p, [_fresh_product(read, x, y, i) for i in ids], step_v, terms)

        # FedOut
        h = _mean(_hypergrad(read, x, y, v, i) for i in ids)
        if released:
            if cancelling:
                h = _mean(_corrected(read, x, y, h, i) for i in ids)
            return _add(x, h, -step_x), y, v

        def upper(x: Params, batch: Batch) -> Params:
            return _upper_grad_x(x, y)(batch)

        x = _mean(_svrg(upper, x, h, read.local(i, UPPER), local_steps, step_x) for i in ids)
        return x, y, v

    return iterate


def _svrg(
    gradient: Callable[[Params, Batch], Params],
    start: Params,
    mean: Params,
    batches: Iterator[Batch],
    count: int,
    step: float,
) -> Params:
    """Return z after steps  z -= (step / count) [gradient(z) - gradient(start) + mean]."""
    z = start
    for batch in islice(batches, count):
        change = _add(_add(gradient(z, batch), gradient(start, batch), -1), mean)
        z = _add(z, change, -step / count)
    return z


def _neumann_series(p: Params, products: list[Product], step: float, terms: int) -> Params:
    """Return v = s sum_j p_j  with  p_j = p_{j-1} - s mean_i H_i p_{j-1}."""
    total = p
    for _ in range(terms):
        p = _add(p, _mean(product(p) for product in products), -step)
        total = _add(total, p)
    return tuple(step * leaf for leaf in total)


def _released_series(p: Params, products: list[Product], step: float, terms: int) -> Params:
    """Return v = s [p + sum_j (1/j) mean_i (I - s H_i)^j p]."""
    total, own = p, [p] * len(products)
    for j in range(1, terms + 1):
        own = [
            _add(mine, product(mine), -step) for mine, product in zip(own, products, strict=True)
        ]
        total = _add(total, _mean(own), 1 / j)
    return tuple(step * leaf for leaf in total)


def _fresh_product(read: Reader, x: Params, y: Params, client: int) -> Product:
    """Return the function p -> H_i p that reads the client's samples at every call."""
    y = _variables(y)

    def product(p: Params) -> Params:
        def one(batch: Batch) -> Params:
            return grad(_lower_slope(x, y, batch), y, grad_outputs=p)

        return _average(one, read.answer(client, LOWER))

    return product


def _kept_product(read: Reader, x: Params, y: Params, client: int) -> Product:
    """Return the function p -> H_i p that reads once and differentiates the same graph again."""
    y = _variables(y)
    d_y = _average(lambda batch: _lower_slope(x, y, batch), read.answer(client, LOWER))
    return lambda p: grad(d_y, y, grad_outputs=p, retain_graph=True)


def _hypergrad(read: Reader, x: Params, y: Params, v: Params, client: int) -> Params:
    """Return grad_x f_i - grad^2_xy g_i v."""
    x, y = _variables(x), _variables(y)

    def mixed(batch: Batch) -> Params:
        return grad(_lower_slope(x, y, batch), x, grad_outputs=v)

    indirect = _average(mixed, read.answer(client, LOWER))
    return _add(_average(_upper_grad_x(x, y), read.answer(client, UPPER)), indirect, -1)


def _corrected(read: Reader, x: Params, y: Params, h: Params, client: int) -> Params:
    """Return h with the correction of a first local step, which is zero."""
    here, there = (_average(_upper_grad_x(x, y), read.answer(client, UPPER)) for _ in range(2))
    return _add(_add(here, there, -1), h)


def _lower_slope(x: Params, y: Params, batch: Batch) -> Params:
    """Return grad_y g on a batch, to be differentiated again."""
    return grad(_lower_loss(x, y, batch), y, create_graph=True)


def _lower_grad(x: Params, y: Params) -> Oracle:
    """Return the oracle of grad_y g."""
    y = _variables(y)
    return lambda batch: grad(_lower_loss(x, y, batch), y)


def _upper_grad_y(x: Params, y: Params) -> Oracle:
    """Return the oracle of grad_y f."""
    y = _variables(y)
    return lambda batch: grad(_upper_loss(x, y, batch), y)


def _upper_grad_x(x: Params, y: Params) -> Oracle:
    """Return the oracle of grad_x f."""
    x, y = _variables(x), tuple(leaf.detach() for leaf in y)
    return lambda batch: grad(_upper_loss(x, y, batch), x)


def _upper_loss(x: Params, y: Params, batch: Batch) -> Tensor:
    """Return f on a batch: the cross-entropy of the perceptron."""
    images, labels = batch
    hidden = torch.addmm(x[1], images, x[0]).relu()
    return F.cross_entropy(torch.addmm(y[1], hidden, y[0]), labels)


def _lower_loss(x: Params, y: Params, batch: Batch) -> Tensor:
    """Return g on a batch: the cross-entropy and a ridge on y."""
    ridge = sum(leaf.square().sum() for leaf in y)
    return _upper_loss(x, y, batch) + REGULARISATION / 2 * ridge


def _average(oracle: Oracle, batches: Iterable[Batch]) -> Params:
    """Return the mean of an oracle's answers over batches, each weighed by its size."""
    total, count = None, 0
    for batch in batches:
        size = len(batch[1])
        answer = tuple(size * leaf for leaf in oracle(batch))
        total = answer if total is None else _add(total, answer)
        count += size
    assert total is not None
    return tuple(leaf / count for leaf in total)


def _mean(parts: Iterable[Params]) -> Params:
    """Return the mean of what the clients sent."""
    sent = list(parts)
    return tuple(sum(leaves) / len(sent) for leaves in zip(*sent, strict=True))


def _add(a: Params, b: Params, factor: float = 1) -> Params:
    """Return a + factor b."""
    return tuple(torch.add(one, other, alpha=factor) for one, other in zip(a, b, strict=True))


def _variables(leaves: Params) -> Params:
    """Return the same weights, ready to be differentiated by."""
    return tuple(leaf.detach().requires_grad_() for leaf in leaves)


def _enter(leaves: Sequence) -> Params:
    """Return the arrays as float32 tensors."""
    return tuple(torch.as_tensor(leaf, dtype=torch.float32) for leaf in leaves)


def _in_memory(
    pixels: Pixels, clients_rows: Sequence[Rows]
) -> tuple[Tensor, Tensor, list[tuple[Tensor, ...]]]:
    """Return all standardised images, all labels and each client's rows as tensors."""
    images = torch.from_numpy(pixels.images).float().sub_(pixels.mean).mul_(1 / pixels.deviation)
    held = [tuple(map(torch.from_numpy, rows)) for rows in clients_rows]
    return images, torch.from_numpy(pixels.labels).long(), held
