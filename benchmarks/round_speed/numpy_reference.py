"""A SimFBO round of the 784-200-10 perceptron in NumPy: closed forms, only matrix products.

This is the limit the library is measured against: gradients derived by hand, the two batches of a
step stacked so that the hidden layer costs one product forward and one backward, buffers reused.

With H = relu(X W + b), Z = H Y + c, P = softmax(Z), E = (P - onehot) / B and a tangent v = (V, w)
of the head, the logits have the tangent Z' = H V + w and E the tangent E' = P * (Z' - <P, Z'>) / B.
Then S = <grad_y g, v> has grad_y S = (H^T E', sum E') + lambda v and grad_H S = E V^T + E' Y^T.

Inside, a bias is the last row of its weight matrix, against a last column of ones in what feeds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy import ndarray

REGULARISATION = 0.001

Point = tuple[ndarray, ndarray, ndarray]  # (x, y, v), each a matrix whose last row is its bias
State = tuple[Sequence, Sequence, Sequence]  # (x, y, v), each a sequence of arrays
Rows = tuple[ndarray, ndarray]  # (lower rows, upper rows)
Draw = Callable[[int, int], Rows]
Round = Callable[[State, Sequence[int], np.random.Generator], State]


def make_round(
    model: str,
    images: ndarray,
    labels: ndarray,
    clients_rows: Sequence[Rows],
    *,
    tau: ndarray,
    batch_size: int,
    steps: tuple[float, float, float],
    server_steps: tuple[float, float, float] | None = None,
    draw: Draw | None = None,
) -> Round:
    """Returns a function that runs one SimFBO round (a = 1, equal client weights, no projection).

    Args:
        model: Only "mlp" has closed forms here.
        images: All images [n, 784], uint8 (scaled to [0, 1] here) or floating point.
        labels: All labels, integers [n].
        clients_rows: Per client, the rows of its lower and of its upper images.
        tau: Local steps of each client.
        batch_size: Images in each of the two batches of a step.
        steps: Local step sizes (y, v, x), all positive.
        server_steps: Server step sizes (y, v, x); the local ones unless given.
        draw: `draw(client, step)` returns the (lower, upper) rows of a batch in place of the rng.
    """
    if model != "mlp":
        raise ValueError(f"The NumPy reference has closed forms for 'mlp' only, not for {model!r}.")
    pixels, classes = _with_ones(images), np.asarray(labels)
    sizes = (steps[2], steps[0], steps[1])
    ratio_y, ratio_v, ratio_x = (
        server / local for server, local in zip(server_steps or steps, steps, strict=True)
    )

    def run_round(state: State, cohort_ids: Sequence[int], rng: np.random.Generator) -> State:
        pick = draw or _random_draw(clients_rows, batch_size, rng)
        x, y, v = (np.vstack(part).astype(np.float32) for part in state)
        start = (x, y, v)
        totals = tuple(np.zeros_like(part) for part in start)
        scratch = _Scratch(x, 2 * batch_size)
        for client in cohort_ids:
            point = start
            for step in range(int(tau[client])):
                rows = np.concatenate(pick(client, step))
                np.take(pixels, rows, axis=0, out=scratch.inputs, mode="clip")
                moves = _moves(point, scratch, classes[rows], sizes)
                for total, move in zip(totals, moves, strict=True):
                    total += move
                if step + 1 < tau[client]:  # nobody looks at the last local iterate
                    point = scratch.moved(point, moves)
        ends = zip(start, totals, (ratio_x, ratio_y, ratio_v), strict=True)
        x, y, v = (p - np.float32(ratio / len(cohort_ids)) * total for p, total, ratio in ends)
        return (x[:-1], x[-1]), (y[:-1], y[-1]), (v[:-1], v[-1])

    return run_round


class _Scratch:
    """Buffers reused by every step: fresh pages would cost more than filling them."""

    def __init__(self, x: ndarray, rows: int) -> None:
        self.inputs = np.empty((rows, x.shape[0]), np.float32)
        self.hidden = np.ones((rows, x.shape[1] + 1), np.float32)  # the last column stays 1
        self.activations = np.empty((rows, x.shape[1]), np.float32)
        self.errors = np.empty((rows, x.shape[1]), np.float32)
        self.move = np.empty_like(x)
        self.x = np.empty_like(x)

    def moved(self, point: Point, moves: Point) -> Point:
        """Returns the point less the moves; x is written to a buffer, y and v are small."""
        np.subtract(point[0], moves[0], out=self.x)
        return self.x, point[1] - moves[1], point[2] - moves[2]


def _moves(point: Point, scratch: _Scratch, classes: ndarray, sizes: tuple[float, ...]) -> Point:
    """Returns the directions of x, y and v times their step sizes.

    The rows of the batch are the lower images, then the upper ones. x's step size is folded in
    before the large product, which saves a pass over x.
    """
    x, y, v = point
    half = len(classes) // 2
    hidden = scratch.hidden
    np.dot(scratch.inputs, x, out=scratch.activations)
    np.maximum(scratch.activations, 0, out=hidden[:, :-1])
    probabilities = _softmax(hidden @ y)
    tangents = _logit_tangents(probabilities[:half], hidden[:half] @ v)
    errors = probabilities
    errors[np.arange(len(errors)), classes] -= 1
    errors /= half
    by_head = hidden[:half].T @ np.hstack((errors[:half], tangents))
    d_y = by_head[:, : y.shape[1]] + REGULARISATION * y
    d_v = by_head[:, y.shape[1] :] + REGULARISATION * v - hidden[half:].T @ errors[half:]
    back = _hidden_gradient(scratch, errors, tangents, y, v)
    back *= sizes[0]
    return np.dot(scratch.inputs.T, back, out=scratch.move), sizes[1] * d_y, sizes[2] * d_v


def _softmax(logits: ndarray) -> ndarray:
    """Returns the softmax of each row."""
    logits -= logits.max(axis=1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=1, keepdims=True)
    return logits


def _logit_tangents(probabilities: ndarray, tangents: ndarray) -> ndarray:
    """Returns E', the tangent of the mean cross-entropy's gradient, from that of the logits."""
    means = np.einsum("ij,ij->i", probabilities, tangents)[:, None]
    return probabilities * (tangents - means) / len(tangents)


def _hidden_gradient(
    scratch: _Scratch, errors: ndarray, tangents: ndarray, y: ndarray, v: ndarray
) -> ndarray:
    """Returns grad f - grad S with respect to the hidden layer before its relu, for all rows."""
    half, back = len(tangents), scratch.errors
    np.dot(errors[half:], y[:-1].T, out=back[half:])
    heads = np.hstack((v[:-1], y[:-1])).T
    np.dot(np.hstack((-errors[:half], -tangents)), heads, out=back[:half])
    back *= scratch.activations > 0
    return back


def _with_ones(images: ndarray) -> ndarray:
    """Returns the images as float32 rows that end in a 1."""
    flat = images.reshape(len(images), -1)
    rows = np.ones((len(flat), flat.shape[1] + 1), np.float32)
    np.divide(flat, 255 if images.dtype == np.uint8 else 1, out=rows[:, :-1], casting="unsafe")
    return rows


def _random_draw(clients_rows: Sequence[Rows], batch_size: int, rng: np.random.Generator) -> Draw:
    """Returns a draw that samples each batch uniformly, with replacement."""

    def draw(client: int, step: int) -> Rows:
        del step
        lower, upper = clients_rows[client]
        return rng.choice(lower, batch_size), rng.choice(upper, batch_size)

    return draw
