"""SimFBO rounds of the quadratic and of the ridge in NumPy: closed forms, everyone takes part.

The limit for small problems: gradients derived by hand, the clients' coefficients laid out once so
that all messages come from a few long products, buffers reused. Every client's message exists
before the weighted sum; nothing is averaged over clients beforehand.

One local step, float32, no projection of v. Triples are in the order (x, y, v).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

Triple = tuple[ndarray, ndarray, ndarray]
Rounds = Callable[[int], Triple]  # how many rounds -> (x, y, v) after them, from the same start
Samples = tuple[ndarray, ndarray]  # features [clients, rows, d] and targets [clients, rows]

_SPARSE_FROM = 32  # variables of at least this size: products with blocks of zeros are left out


def quadratic_rounds(task: Any, steps: Sequence[float], rounds: int) -> Triple:
    """Return (x, y, v) after that many rounds of a quadratic task.

    Args:
        task: from `simfbo.tasks.quadratic`, with one sample per client.
        steps: the step sizes (x, y, v).
        rounds: how many.
    """
    return prepare_quadratic(task, steps)(rounds)


def prepare_quadratic(task: Any, steps: Sequence[float]) -> Rounds:
    """Lay out the coefficients of a quadratic task; return the function that runs rounds.

    A client's message is affine in z = (x, y, v):

        d_x = D_i x + B_i' v - D_i s_i;   d_y = A_i y - B_i x - c_i;   d_v = A_i v - C_i y + C_i t_i
    """
    A, B, c, C, t, D, s = coefficients(task)
    start = [np.asarray(z, np.float32) for z in (task.x0, task.y0, 0 * task.y0)]
    offsets = [-_apply(D, s), -c, _apply(C, t)]
    blocks = {(0, 0): D, (0, 2): B.swapaxes(1, 2), (1, 0): -B, (1, 1): A, (2, 1): -C, (2, 2): A}
    weights = np.asarray(task.data.p, np.float32)
    affine = _by_block if min(len(start[0]), len(start[1])) >= _SPARSE_FROM else _dense
    return affine(blocks, offsets, start, weights, steps)


def ridge_rounds(
    lower: Samples, upper: Samples, steps: Sequence[float], rounds: int, *, gram: bool = False
) -> Triple:
    """Return (x, y, v) after that many rounds of the ridge with a penalty per feature, from zeros.

        g_i = mean 1/2 (a'y - b)^2 + 1/2 sum exp(x) y^2;     f_i = mean 1/2 (a'y - b)^2

    Args:
        lower: the clients' training samples.
        upper: their validation samples.
        steps: the step sizes (x, y, v).
        rounds: how many.
        gram: work with each client's A'A and A'b, computed once, in place of its samples.
    """
    return prepare_ridge(lower, upper, steps, gram=gram)(rounds)


def prepare_ridge(
    lower: Samples, upper: Samples, steps: Sequence[float], *, gram: bool = False
) -> Rounds:
    """Lay out the samples of a ridge; return the function that runs rounds.

    With e = exp(x) and means over a client's rows:

        d_x = -e y v;   d_y = mean a (a'y - b) + e y;   d_v = mean a a'v + e v - mean a (a'y - b)

    where the last mean is over the upper rows.
    """
    clients, _, dim = lower[0].shape
    messages = np.empty((clients, 3, dim), np.float32)
    flat, weights = messages.reshape(clients, -1), np.full(clients, 1 / clients, np.float32)
    sizes = np.asarray(steps, np.float32)[:, None]
    write = (_from_grams if gram else _from_rows)(_scaled(*lower), _scaled(*upper), messages)

    def run(rounds: int) -> Triple:
        z = np.zeros((3, dim), np.float32)
        for _ in range(rounds):
            x, y, v = z
            penalty = np.exp(x)
            write(y, v)
            messages[:, 1:] += penalty * z[1:]
            messages[:, 0] = -penalty * y * v
            z -= sizes * np.dot(weights, flat).reshape(3, dim)
        return z[0], z[1], z[2]

    return run


def coefficients(task: Any) -> list[ndarray]:
    """Return A, B, c, C, t, D, s of all clients, stacked along the first axis."""
    for part in (task.data.lower, task.data.upper):
        if part.largest != 1 or len(part.count) != task.data.n:
            raise ValueError("The closed forms expect one sample per client.")
    lower, upper = (
        [np.asarray(leaf, np.float32)[np.asarray(part.rows)] for leaf in part.samples]
        for part in (task.data.lower, task.data.upper)
    )
    return [*lower, *upper]


def _dense(
    blocks: dict[tuple[int, int], ndarray],
    offsets: Sequence[ndarray],
    start: Sequence[ndarray],
    weights: ndarray,
    steps: Sequence[float],
) -> Rounds:
    """Return the rounds of affine messages, as one product for all variables of all clients."""
    sizes = [len(z) for z in start]
    clients = len(weights)
    full = np.zeros((clients, sum(sizes), sum(sizes)), np.float32)
    ends = np.cumsum([0, *sizes])
    for (row, column), block in blocks.items():
        full[:, ends[row] : ends[row + 1], ends[column] : ends[column + 1]] = block
    matrix, offset = _long(full), np.concatenate(offsets, axis=1).ravel()
    messages = np.empty_like(offset)
    by_client, mean = messages.reshape(clients, -1), np.empty(sum(sizes), np.float32)
    step = np.repeat(np.asarray(steps, np.float32), sizes)

    def run(rounds: int) -> Triple:
        z = np.concatenate(start)
        for _ in range(rounds):
            np.dot(z, matrix, out=messages)
            np.add(messages, offset, out=messages)
            np.dot(weights, by_client, out=mean)
            np.multiply(mean, step, out=mean)
            np.subtract(z, mean, out=z)
        return tuple(np.split(z, ends[1:-1]))  # pyright: ignore[reportReturnType]

    return run


def _by_block(
    blocks: dict[tuple[int, int], ndarray],
    offsets: Sequence[ndarray],
    start: Sequence[ndarray],
    weights: ndarray,
    steps: Sequence[float],
) -> Rounds:
    """Return the rounds of affine messages, as one product per block that is not zero."""
    clients = len(weights)
    matrices = {place: _long(block) for place, block in blocks.items()}
    messages = [np.empty_like(offset) for offset in offsets]
    products = {place: np.empty(m.shape[1], np.float32) for place, m in matrices.items()}
    step = np.asarray(steps, np.float32)

    def run(rounds: int) -> Triple:
        point = [z.copy() for z in start]
        for _ in range(rounds):
            for message, offset in zip(messages, offsets, strict=True):
                np.copyto(message, offset)
            for (row, column), matrix in matrices.items():
                out = products[row, column]
                np.dot(point[column], matrix, out=out)
                messages[row] += out.reshape(clients, -1)
            for z, message, size in zip(point, messages, step, strict=True):
                z -= size * np.dot(weights, message)
        return tuple(point)  # pyright: ignore[reportReturnType]

    return run


def _from_rows(lower: Samples, upper: Samples, messages: ndarray) -> Callable:
    """Return the function (y, v) that writes the losses' part of d_y and d_v from the samples.

    Forward products read the samples feature by feature, backward products row by row: both are
    kept. The rows of a client are its lower ones, then its upper ones.
    """
    clients, rows, _ = lower[0].shape
    forward = [_long(samples) for samples, _ in (lower, upper)]
    backward = np.concatenate((lower[0], upper[0]), axis=1)
    residuals = np.zeros((clients, 2, backward.shape[1]), np.float32)  # upper rows of d_y stay 0
    of_y, of_v = residuals[:, 0, :rows], residuals[:, 1, :rows]
    of_f = residuals[:, 1, rows:]

    def write(y: ndarray, v: ndarray) -> None:
        np.subtract(np.dot(y, forward[0]).reshape(of_y.shape), lower[1], out=of_y)
        np.copyto(of_v, np.dot(v, forward[0]).reshape(of_v.shape))
        np.subtract(upper[1], np.dot(y, forward[1]).reshape(of_f.shape), out=of_f)
        np.matmul(residuals, backward, out=messages[:, 1:])

    return write


def _from_grams(lower: Samples, upper: Samples, messages: ndarray) -> Callable:
    """Return the function (y, v) that writes the same from A'A and A'b of each client."""
    (G, h), (K, k) = (_gram(*samples) for samples in (lower, upper))
    of_y = _long(np.concatenate((G, -K), axis=1))
    of_v, offset = _long(G), np.stack((-h, k), axis=1)

    def write(y: ndarray, v: ndarray) -> None:
        np.add(np.dot(y, of_y).reshape(offset.shape), offset, out=messages[:, 1:])
        messages[:, 2] += np.dot(v, of_v).reshape(h.shape)

    return write


def _gram(features: ndarray, targets: ndarray) -> tuple[ndarray, ndarray]:
    """Return A'A and A'b of each client."""
    turned = features.swapaxes(1, 2)
    return np.matmul(turned, features), np.matmul(turned, targets[..., None])[..., 0]


def _scaled(features: ndarray, targets: ndarray) -> Samples:
    """Divide the samples by the root of their number, so that sums over rows are means."""
    root = np.float32(features.shape[1] ** 0.5)
    return features.astype(np.float32) / root, targets.astype(np.float32) / root


def _long(matrices: ndarray) -> ndarray:
    """Lay out [clients, rows, columns] as [columns, clients * rows].

    `z @ result` is every client's product with z, client after client, in long strides.
    """
    columns = matrices.shape[2]
    return np.ascontiguousarray(matrices.transpose(2, 0, 1).reshape(columns, -1))


def _apply(matrices: ndarray, vectors: ndarray) -> ndarray:
    """Return each client's matrix times its vector."""
    return np.matmul(matrices, vectors[..., None])[..., 0]
