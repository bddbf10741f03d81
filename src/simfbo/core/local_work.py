"""Local work: how many steps tau_i each client takes, and how each step is weighted.

A client's steps follow a linear recursion. With direction d_k at step k and coefficient c_k,

    m <- momentum * m + c_k d_k,     q <- keep * q + m,     iterate = start - eta * q

so that what it sends is  q = sum_k a_k d_k  with

    a_k = c_k sum_{j=k}^{tau-1} keep^(tau-1-j) momentum^(j-k).

Plain SGD has a_k = 1; a proximal term a_k = (1-alpha)^(tau-1-k); momentum m
a_k = (1 - m^(tau-k)) / (1-m). The path is the true one of the local optimiser, and a only weighs
and normalises (Wang et al. 2020, FedNova). `coefficients` gives any a_k, with the paper's own path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import keys
from simfbo.core.keys import Purpose, host_rng, seed_rng
from simfbo.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = [
    "LocalPlan",
    "LocalRule",
    "LocalWork",
    "coefficients",
    "constant",
    "effective",
    "fixed",
    "momentum",
    "proximal",
    "sgd",
    "uniform",
]


class LocalRule(NamedTuple):
    """A local optimiser. Make one with `sgd`, `proximal`, `momentum` or `coefficients`.

    Attributes:
        keep: how much of q is kept at each step; 1 - alpha with a proximal term.
        momentum: the momentum within a round.
        steps: c_k, where they are not all one.
    """

    keep: float = 1.0
    momentum: float = 0.0
    steps: tuple[float, ...] = ()


def sgd() -> LocalRule:
    """Plain gradient steps, a_k = 1."""
    return LocalRule()


def proximal(alpha: float) -> LocalRule:
    """Gradient steps with a proximal term, a_k = (1-alpha)^(tau-1-k).

    Args:
        alpha: how far each step is pulled back to the start of the round; eta mu for a proximal
            term mu/2 ||x - x_start||^2 and step size eta.
    """
    if not 0 <= alpha < 1:
        raise UserError(f"The proximal alpha must lie in [0, 1), got {alpha}.")
    return LocalRule(keep=1.0 - alpha)


def momentum(m: float) -> LocalRule:
    """Heavy-ball momentum within a round, a_k = (1 - m^(tau-k)) / (1-m)."""
    if not 0 <= m < 1:
        raise UserError(f"The momentum must lie in [0, 1), got {m}.")
    return LocalRule(momentum=m)


def coefficients(steps: Sequence[float]) -> LocalRule:
    """The SimFBO paper's own update: step k has size a_k eta, with the given a_k."""
    if not len(steps) or min(steps) <= 0:
        raise UserError("Local coefficients must be positive numbers, one per step.")
    return LocalRule(steps=tuple(map(float, steps)))


@partial(
    jax.tree_util.register_dataclass, data_fields=["tau", "steps", "norm"], meta_fields=["rule"]
)
@dataclass(frozen=True)
class LocalPlan:
    """How much local work is done: by all clients (with a leading axis), or by one.

    Attributes:
        tau: number of local steps.
        steps: c_k, zero from step tau on.
        norm: ||a||_1.
        rule: the local optimiser.
    """

    tau: Int[Any, "*clients"]
    steps: Float[Any, "*clients most"]
    norm: Float[Any, "*clients"]
    rule: LocalRule

    def __getitem__(self, clients: Any) -> LocalPlan:
        return LocalPlan(self.tau[clients], self.steps[clients], self.norm[clients], self.rule)


@dataclass(frozen=True)
class LocalWork:
    """Who does how much: a function (key, n) -> `LocalPlan` of all n clients.

    Make one with `constant`, `fixed` or `uniform`.

    Attributes:
        draw: (key, n) -> tau of every client; see `simfbo.sampling.keyed`.
        tau_max: the largest tau that can be drawn.
        rule: the local optimiser.
        assigned: whether the server assigns the tau_i, and so knows all of them in advance.
            Otherwise it learns ||a_i||_1 only from the clients that reply.
    """

    draw: Callable[[jax.Array, int], np.ndarray]
    tau_max: int
    rule: LocalRule = LocalRule()
    assigned: bool = True

    def __post_init__(self) -> None:
        if self.tau_max < 1:
            raise UserError(f"Clients take at least one local step, got {self.tau_max}.")
        if self.rule.steps and len(self.rule.steps) < self.tau_max:
            raise UserError(
                f"{len(self.rule.steps)} local coefficients are given for up to {self.tau_max} "
                "steps: give one per step."
            )

    def __call__(self, key: jax.Array, n: int, clients: Any = slice(None)) -> LocalPlan:
        """Return the plan of all n clients, or of some, for the exchange of `key`."""
        tau = np.asarray(self.draw(key, n), np.int32)[clients]
        if tau.min() < 1 or tau.max() > self.tau_max:
            raise UserError(f"Numbers of local steps must lie between 1 and {self.tau_max}.")
        return self.plan(tau)

    def plan(self, tau: Int[Any, "*clients"]) -> LocalPlan:
        """Return the plan for numbers of local steps; they may be traced."""
        steps, norms = _tables(self.rule, self.tau_max)
        if isinstance(tau, jax.Array):
            steps, norms = jnp.asarray(steps, float), jnp.asarray(norms, float)
        return LocalPlan(tau, steps[tau], norms[tau], self.rule)


@lru_cache
def _tables(rule: LocalRule, tau_max: int) -> tuple[np.ndarray, np.ndarray]:
    """Return c and ||a||_1 for every tau from 0 to tau_max."""
    taus = range(tau_max + 1)
    full = np.asarray(rule.steps[:tau_max] or np.ones(tau_max))
    steps = np.stack([np.where(np.arange(tau_max) < tau, full, 0.0) for tau in taus])
    return steps, _norms(rule, full)


def _norms(rule: LocalRule, steps: np.ndarray) -> np.ndarray:
    """Return ||a||_1 for every tau: q of the recursion on top, all directions being one."""
    norms, m = [0.0], 0.0
    for step in steps:
        m = rule.momentum * m + step
        norms.append(rule.keep * norms[-1] + m)
    return np.array(norms)


def effective(rule: LocalRule, tau: int) -> np.ndarray:
    """Return a_0 .. a_{tau-1}, the weights of the directions in q.

    Example:
        >>> effective(momentum(0.5), 3).tolist()
        [1.75, 1.5, 1.0]
    """
    steps = rule.steps or (1.0,) * tau
    return np.array(
        [
            steps[k]
            * sum(rule.keep ** (tau - 1 - j) * rule.momentum ** (j - k) for j in range(k, tau))
            for k in range(tau)
        ]
    )


def constant(tau: int, rule: LocalRule = LocalRule()) -> LocalWork:
    """Every client takes `tau` local steps."""
    return LocalWork(keys.constant(lambda key, n: np.full(n, tau)), tau, rule)


def fixed(taus: Sequence[int], rule: LocalRule = LocalRule(), assigned: bool = True) -> LocalWork:
    """Client i takes `taus[i]` local steps in every round."""
    table = np.asarray(taus)
    if table.ndim != 1 or not len(table) or table.dtype.kind not in "iu" or table.min() < 1:
        raise UserError("Give one whole number of local steps per client, each at least 1.")

    @keys.constant
    def draw(key: jax.Array, n: int) -> np.ndarray:
        if n != len(table):
            raise UserError(f"{len(table)} numbers of local steps are given for {n} clients.")
        return table

    return LocalWork(draw, int(table.max()), rule, assigned)


def uniform(
    low: int,
    high: int,
    rule: LocalRule = LocalRule(),
    *,
    every_round: bool = False,
    seed: int = 0,
    assigned: bool = True,
) -> LocalWork:
    """Client i takes tau_i local steps, drawn uniformly from {low..high}.

    Args:
        low: the fewest steps.
        high: the most steps.
        rule: the local optimiser.
        every_round: draw tau_i again in every round; by default once per run, from `seed`.
        seed: of the draw once per run.
        assigned: see `LocalWork`.
    """
    if not 1 <= low <= high:
        raise UserError(f"Local steps must satisfy 1 <= low <= high, got {low} and {high}.")

    @(keys.keyed if every_round else keys.constant)
    def draw(key: jax.Array, n: int) -> np.ndarray:
        rng = (
            host_rng(key, Purpose.LOCAL_STEPS)
            if every_round
            else seed_rng(seed, Purpose.LOCAL_STEPS)
        )
        return rng.integers(low, high + 1, n)

    return LocalWork(draw, high, rule, assigned)
