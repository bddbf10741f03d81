"""SimFBO rounds of the quadratic in NumPy, as one writes the formulas down.

Directions of all clients over stacked coefficients, one product per term, then the weighted sums:

    d_x = D (x - s) + B' v;     d_y = A y - B x - c;     d_v = A v - C (y - t)

One local step, float32, no projection of v; nothing is computed beforehand.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy import ndarray

Triple = tuple[ndarray, ndarray, ndarray]


def prepare(
    coefficients: Sequence[ndarray],
    weights: ndarray,
    x0: ndarray,
    y0: ndarray,
    steps: Sequence[float],
) -> Callable[[int], Triple]:
    """Return the function that runs rounds from (x0, y0, 0).

    Args:
        coefficients: A, B, c, C, t, D, s of all clients, stacked along the first axis.
        weights: p of the clients.
        x0: initial x.
        y0: initial y.
        steps: the step sizes (x, y, v).
    """
    A, B, c, C, t, D, s = coefficients
    p = np.asarray(weights, np.float32)
    step_x, step_y, step_v = (np.float32(step) for step in steps)

    def run(rounds: int) -> Triple:
        x, y = np.array(x0, np.float32), np.array(y0, np.float32)
        v = np.zeros_like(y)
        for _ in range(rounds):
            d_x = _apply(D, x - s) + B.swapaxes(1, 2) @ v
            d_y = A @ y - B @ x - c
            d_v = A @ v - _apply(C, y - t)
            x, y, v = x - step_x * (p @ d_x), y - step_y * (p @ d_y), v - step_v * (p @ d_v)
        return x, y, v

    return run


def _apply(matrices: ndarray, vectors: ndarray) -> ndarray:
    """Return each client's matrix times its vector."""
    return (matrices @ vectors[..., None])[..., 0]
