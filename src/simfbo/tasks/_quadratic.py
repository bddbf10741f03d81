"""Quadratic bilevel problems with closed forms of solution and hypergradient.

    g_i(x, y) = 1/2 y'A_i y - y'(B_i x + c_i)
    f_i(x, y) = 1/2 (y - t_i)'C_i (y - t_i) + 1/2 (x - s_i)'D_i (x - s_i)

With bars for sums weighted by p:  y*(x) = A^-1 (B x + c),  v*(x) = A^-1 (C y* - Ct),
grad Phi(x) = D x - Ds + B' v*(x).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.data import from_clients
from simfbo.core.keys import Purpose, seed_rng
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.tasks.task import Task


class ClosedForm(NamedTuple):
    """The exact solution of a quadratic bilevel problem for given client weights."""

    A: np.ndarray
    B: np.ndarray
    c: np.ndarray
    C: np.ndarray
    Ct: np.ndarray
    D: np.ndarray
    Ds: np.ndarray

    def y(self, x: PyTree) -> np.ndarray:
        """Return y*(x)."""
        return np.linalg.solve(self.A, self.B @ np.asarray(x) + self.c)

    def v(self, x: PyTree) -> np.ndarray:
        """Return v*(x), the solution of grad^2_yy G v = grad_y F."""
        return np.linalg.solve(self.A, self.C @ self.y(x) - self.Ct)

    def hypergradient(self, x: PyTree) -> np.ndarray:
        """Return grad Phi(x)."""
        return self.D @ np.asarray(x) - self.Ds + self.B.T @ self.v(x)

    def x(self) -> np.ndarray:
        """Return the minimiser of Phi, by one linear solve: grad Phi is affine."""
        zero = np.zeros(self.B.shape[1])
        at_zero = self.hypergradient(zero)
        slope = np.stack([self.hypergradient(e) - at_zero for e in np.eye(len(zero))], axis=1)
        return np.linalg.solve(slope, -at_zero)


class Quadratic(NamedTuple):
    """The coefficients of n clients, stacked along the first axis."""

    A: np.ndarray
    B: np.ndarray
    c: np.ndarray
    C: np.ndarray
    t: np.ndarray
    D: np.ndarray
    s: np.ndarray

    def closed_form(self, weights: Any = None) -> ClosedForm:
        """Return the exact solution for the given client weights; equal weights by default."""
        n = len(self.A)
        w = np.full(n, 1 / n) if weights is None else np.asarray(weights)

        def mean(values: np.ndarray) -> np.ndarray:
            return np.tensordot(w, values, 1)

        targets = np.einsum("nij,nj->ni", self.C, self.t), np.einsum("nij,nj->ni", self.D, self.s)
        return ClosedForm(
            *map(mean, (self.A, self.B, self.c, self.C, targets[0], self.D, targets[1]))
        )

    def task(
        self,
        p: Any = None,
        samples: int = 1,
        noise: float = 0.0,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> Task:
        """Build the task with these coefficients.

        Args:
            p: client weights; equal by default.
            samples: per client; their c, t and s scatter around the client's values, which are
                exactly their mean.
            noise: standard deviation of the scatter.
            batch_size: None for full batches, which are free of noise.
            seed: of the scatter.

        Returns:
            The task; its metrics are distances from the closed form.
        """
        n = len(self.A)
        rng = seed_rng(seed, Purpose.SCATTER)
        lower = [
            (
                _repeat(self.A[i], samples),
                _repeat(self.B[i], samples),
                _scatter(self.c[i], samples, noise, rng),
            )
            for i in range(n)
        ]
        upper = [
            (
                _repeat(self.C[i], samples),
                _scatter(self.t[i], samples, noise, rng),
                _repeat(self.D[i], samples),
                _scatter(self.s[i], samples, noise, rng),
            )
            for i in range(n)
        ]
        data = from_clients(lower, upper, batch_size=batch_size, p=p)
        truth = self.closed_form(data.p)
        best = truth.x()
        x0, y0 = np.zeros(self.B.shape[2]), np.zeros(self.B.shape[1])
        return Task(
            "quadratic",
            PROBLEM,
            data,
            x0,
            y0,
            lambda s: _metrics(truth, best, s),
            "grad_norm_squared",
        )


def random_quadratic(
    clients: int = 10, dim_x: int = 4, dim_y: int = 5, heterogeneity: float = 1.0, seed: int = 0
) -> Quadratic:
    """Draw random coefficients; with heterogeneity 0 all clients are the same.

    The clients' Hessians A_i have eigenvalues in [1, 2 + heterogeneity].
    """
    rng = seed_rng(seed, Purpose.COEFFICIENTS)

    def spread(base: np.ndarray) -> np.ndarray:
        return base + heterogeneity * rng.normal(size=(clients, *base.shape))

    def hessians(dim: int, low: float) -> np.ndarray:
        base = _symmetric(rng, dim, low, 2 * low)
        return np.stack([base + heterogeneity * _symmetric(rng, dim, 0, 1) for _ in range(clients)])

    return Quadratic(
        A=hessians(dim_y, 1.0),
        B=spread(rng.normal(size=(dim_y, dim_x))) / np.sqrt(dim_x),
        c=spread(rng.normal(size=dim_y)),
        C=hessians(dim_y, 0.5),
        t=spread(rng.normal(size=dim_y)),
        D=hessians(dim_x, 0.5),
        s=spread(rng.normal(size=dim_x)),
    )


def quadratic(
    clients: int = 10,
    dim_x: int = 4,
    dim_y: int = 5,
    heterogeneity: float = 1.0,
    samples: int = 1,
    noise: float = 0.0,
    batch_size: int | None = None,
    seed: int = 0,
) -> Task:
    """Build a random quadratic task; see `random_quadratic` and `Quadratic.task`.

    Example:
        >>> quadratic(clients=3).data.n
        3
    """
    coefficients = random_quadratic(clients, dim_x, dim_y, heterogeneity, seed)
    return coefficients.task(None, samples, noise, batch_size, seed)


@jax.custom_jvp
def _half_square(A: jax.Array, z: jax.Array) -> jax.Array:
    """Return z'A z / 2 of every sample; A is symmetric, so the gradient takes one product."""
    return 0.5 * jnp.sum(_product(A, z) * z, -1)


_half_square.defjvps(None, lambda dz, value, A, z: jnp.sum(_product(A, z) * dz, -1))


def _product(A: jax.Array, z: jax.Array) -> jax.Array:
    return jnp.einsum("bij,bj->bi", A, z)


def _lower(x: PyTree, y: PyTree, batch: PyTree) -> jax.Array:
    A, B, c = batch
    # A copy of y for every sample: otherwise XLA transposes all of A and B in every round.
    copies = y + 0.0 * c
    return jnp.mean(_half_square(A, copies) - jnp.sum((B @ x + c) * copies, -1))


def _upper(x: PyTree, y: PyTree, batch: PyTree) -> jax.Array:
    C, t, D, s = batch
    return jnp.mean(_half_square(C, y - t) + _half_square(D, x - s))


PROBLEM = BilevelProblem(upper=_upper, lower=_lower)


@np.errstate(all="ignore")
def _metrics(truth: ClosedForm, best: np.ndarray, state: PyTree) -> dict[str, float]:
    """Return the distances of a state from the closed form at its x; they may be infinite."""
    x, y = np.asarray(state.x), np.asarray(state.y)
    metrics = {
        "grad_norm_squared": float(np.sum(truth.hypergradient(x) ** 2)),
        "x_error": float(np.linalg.norm(x - best)),
        "y_error": float(np.linalg.norm(y - truth.y(x))),
    }
    if getattr(state, "v", None) is not None:
        metrics["v_error"] = float(np.linalg.norm(np.asarray(state.v) - truth.v(x)))
    return metrics


def _symmetric(rng: np.random.Generator, dim: int, low: float, high: float) -> np.ndarray:
    """Draw a symmetric matrix with eigenvalues spread evenly over [low, high]."""
    basis = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    return (basis * np.linspace(low, high, dim)) @ basis.T


def _repeat(value: np.ndarray, samples: int) -> np.ndarray:
    return np.repeat(value[None], samples, axis=0)


def _scatter(value: np.ndarray, samples: int, noise: float, rng: np.random.Generator) -> np.ndarray:
    """Draw samples around `value` whose mean is exactly `value`."""
    offsets = rng.normal(size=(samples, *value.shape))
    return value + noise * (offsets - offsets.mean(axis=0))
