"""Local work: the number of local steps tau_i of each client, and its local optimiser.

Clients may have different local optimisers (rules). The steps follow a linear recursion. With
direction d_k at step k and coefficient c_k,

    m <- momentum * m + c_k d_k,     q <- keep * q + m,     iterate = start - eta * q

so that the message is  q = sum_k a_k d_k  with

    a_k = c_k sum_{j=k}^{tau-1} keep^(tau-1-j) momentum^(j-k).

Plain SGD has a_k = 1; a proximal term a_k = (1-alpha)^(tau-1-k); momentum m
a_k = (1 - m^(tau-k)) / (1-m). The iterates are those of the local optimiser; the a_k are used for
weighting and normalisation only (Wang et al. 2020, FedNova). `coefficients` sets arbitrary a_k,
with the iterates of the SimFBO paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from simfbo.core import keys
from simfbo.core.keys import HostDraw, HostValues, Purpose, seed_rng
from simfbo.errors import UserError

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
    """A local optimiser, created by `sgd`, `proximal`, `momentum` or `coefficients`.

    Attributes:
        keep: the factor of q in each step; 1 - alpha with a proximal term.
        momentum: the momentum within a round.
        steps: c_k, if not all are one.
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
        alpha: eta mu, for a proximal term mu/2 ||x - x_start||^2 and step size eta.
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
    """The update of the SimFBO paper: step k has size a_k eta."""
    if not len(steps) or min(steps) <= 0:
        raise UserError("Local coefficients must be positive numbers, one per step.")
    return LocalRule(steps=tuple(map(float, steps)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalPlan:
    """The local work of one client or, with a leading axis, of several.

    Attributes:
        tau: number of local steps.
        steps: c_k, zero from step tau on.
        norm: ||a||_1.
        keep: the factor of q in each step; None if it is one for all clients.
        momentum: the momentum within a round; None if it is zero for all clients.
        plain: all clients take plain gradient steps.
    """

    tau: Int[Any, "*clients"]
    steps: Float[Any, "*clients most"]
    norm: Float[Any, "*clients"]
    keep: Float[Any, "*clients"] | None
    momentum: Float[Any, "*clients"] | None
    plain: bool = eqx.field(static=True)

    def __getitem__(self, clients: Any) -> LocalPlan:
        return jax.tree.map(lambda a: a[clients], self)


class SameForAll(eqx.Module):
    """The same number for all clients, a constant of the program, for loops of fixed length."""

    number: int = eqx.field(static=True)

    def __call__(self, key: Key[Array, ""], ids: Int[Any, " cohort"]) -> np.int32:
        return np.int32(self.number)


class PerClient(eqx.Module):
    """A number for each client, the same in every round."""

    numbers: Int[Any, " n"]

    def __call__(self, key: Key[Array, ""], ids: Int[Any, " cohort"]) -> Int[Any, " cohort"]:
        return self.numbers[ids]


class UniformDraw(eqx.Module):
    """A number from {low .. high} for each client, sampled uniformly in every exchange."""

    low: int = eqx.field(static=True)
    high: int = eqx.field(static=True)
    purpose: Purpose = eqx.field(static=True)

    def __call__(self, key: Key[Array, ""], ids: Int[Any, " cohort"]) -> Int[Array, " cohort"]:
        numbers = keys.uniform(key, self.purpose, ids) * (self.high + 1 - self.low)
        return self.low + jnp.floor(numbers).astype(jnp.int32)


class HostNumbers(HostDraw):
    """A NumPy function (key, n) -> an allowed number for each of all n clients."""

    n: int = eqx.field(static=True)
    allowed: range = eqx.field(static=True)
    error: str = eqx.field(static=True)  # for other numbers

    def draw(self, key: Key[Array, ""], clients: Int[np.ndarray, " cohort"]) -> np.ndarray:
        numbers = np.asarray(self.function(key, self.n), self.dtype)
        low, high = self.allowed[0], self.allowed[-1]
        if numbers.shape != (self.n,) or numbers.min() < low or numbers.max() > high:
            raise UserError(self.error)
        return numbers[clients]


Draw = SameForAll | PerClient | UniformDraw | HostDraw | HostValues
Rules = LocalRule | Sequence[LocalRule]


class Work(eqx.Module):
    """The local work of n clients, as an input of compiled rounds.

    Attributes:
        tau: samples numbers of local steps.
        rule: samples positions in the list of rules.
        rows: the row of each listed rule in the following tables of distinct rules.
        norm: ||a||_1 for every tau from 0 to the largest.
        steps: c_k; None if all are one.
        keep: see `LocalRule`; None if all are one.
        momentum: see `LocalRule`; None if all are zero.
        assigned: see `LocalWork`.
    """

    tau: Draw
    rule: Draw
    rows: Int[Any, " listed"]
    norm: Float[Any, "rules taus"]
    steps: Float[Any, "rules most"] | None
    keep: Float[Any, " rules"] | None
    momentum: Float[Any, " rules"] | None
    assigned: bool = eqx.field(static=True)

    def plan(self, key: Key[Array, ""], ids: Int[Any, " cohort"]) -> LocalPlan:
        """Sample the plan of some clients, without a leading axis if it is the same for all."""
        tau: Any = self.tau(key, ids)
        rule: Any = self.rows[self.rule(key, ids)]
        if np.shape(tau) != np.shape(rule):
            module = jnp if isinstance(rule, jax.Array) else np
            tau, rule = module.broadcast_arrays(tau, rule)
        is_taken = np.arange(self.norm.shape[-1] - 1, dtype=np.int32) < tau[..., None]
        weights, tables = is_taken.astype(self.norm.dtype), (self.steps, self.keep, self.momentum)
        steps, keep, momentum = (None if table is None else table[rule] for table in tables)
        plain = steps is keep is momentum is None
        steps = weights if steps is None else weights * steps
        return LocalPlan(tau, steps, self.norm[rule, tau], keep, momentum, plain)

    def mean_norm(self, key: Key[Array, ""], p: Float[Any, " n"]) -> Any:
        """Return rho = sum_j p_j ||a_j||_1 for the exchange with a key."""
        norm = self.plan(key, np.arange(p.shape[0], dtype=np.int32)).norm
        return norm if jnp.ndim(norm) == 0 else p @ norm


@dataclass(frozen=True)
class LocalWork:
    """The local steps and local optimisers of all clients.

    Created by `constant`, `fixed` or `uniform`.

    Attributes:
        draw: (key, n) -> tau of every client, by a NumPy function; see `simfbo.sampling.keyed`.
        tau_max: the largest possible tau.
        rules: the local optimiser of all clients, or one for each.
        assigned: the server assigns the local work, and so knows all of it in advance. If False,
            it learns ||a_i||_1 only from the clients that reply.
        choose: (key, n) -> the index into `rules` for every client, by a NumPy function; see
            `simfbo.sampling.keyed`. By default client i uses the i-th.
    """

    draw: Draw | Callable[[jax.Array, int], np.ndarray]
    tau_max: int
    rules: Rules = LocalRule()
    assigned: bool = True
    choose: Draw | Callable[[jax.Array, int], np.ndarray] | None = None

    def __post_init__(self) -> None:
        if self.tau_max < 1:
            raise UserError(f"Clients take at least one local step, got {self.tau_max}.")
        if not self._listed or not all(isinstance(rule, LocalRule) for rule in self._listed):
            raise UserError("Local rules are such as local_work.momentum(0.9): give at least one.")
        _require_coefficients(self.tau_max, self._most.max())

    def __call__(self, key: jax.Array, n: int, clients: Any = slice(None)) -> LocalPlan:
        """Sample the plan of all n clients, or of some, for the exchange of `key`."""
        everyone = np.arange(n, dtype=np.int32)
        plan = keys.draw_on_host(self.resolved(n), key, everyone).plan(key, everyone)
        if not np.ndim(plan.tau):
            plan = jax.tree.map(lambda a: np.broadcast_to(a, (n, *np.shape(a))), plan)
        return jax.tree.map(np.asarray, plan)[clients]

    def resolved(self, n: int) -> Work:
        """Prepare the local work of n clients; constant numbers are sampled immediately."""
        rules, key, everyone = self._listed, jax.random.key(0), np.arange(n, dtype=np.int32)
        if self.choose is None and len(rules) not in (1, n):
            raise UserError(
                f"{len(rules)} local rules are given for {n} clients: give one for each, or one "
                "rule for all."
            )
        if isinstance(self.draw, PerClient) and len(self.draw.numbers) != n:
            count = len(self.draw.numbers)
            raise UserError(f"{count} numbers of local steps are given for {n} clients.")

        def prepared(draw: Any, allowed: range, error: str) -> Draw:
            if isinstance(draw, SameForAll | UniformDraw):
                return draw
            if not isinstance(draw, PerClient):
                on_host = HostNumbers(draw, n, allowed, error)
                if not keys.is_constant(draw):
                    return on_host
                draw = PerClient(on_host.draw(key, everyone))
            same = (draw.numbers == draw.numbers[0]).all()  # for loops of a fixed length
            return SameForAll(int(draw.numbers[0])) if same else draw

        tau = prepared(
            self.draw,
            range(1, self.tau_max + 1),
            f"Numbers of local steps must lie between 1 and {self.tau_max}, one for each of {n} "
            "clients.",
        )
        default = PerClient(everyone) if len(rules) > 1 else SameForAll(0)
        rule = prepared(
            self.choose or default,
            range(len(rules)),
            f"Choose one of {len(rules)} local rules for each of {n} clients, by positions from 0 "
            f"to {len(rules) - 1}.",
        )
        if isinstance(tau, SameForAll | PerClient) and isinstance(rule, SameForAll | PerClient):
            _require_coefficients(tau(key, everyone), self._most[rule(key, everyone)])
        else:
            _require_coefficients(self.tau_max, self._most.min())
        distinct = list(dict.fromkeys(rules))
        rows = np.array([distinct.index(rule) for rule in rules], np.int32)
        norm, steps, keep, momentum = _tables(distinct, self.tau_max)
        return Work(tau, rule, rows, norm, steps, keep, momentum, self.assigned)

    @property
    def _listed(self) -> tuple[Any, ...]:
        rules: Any = self.rules
        is_single = isinstance(rules, LocalRule) or not isinstance(rules, Sequence)
        return (rules,) if is_single else tuple(rules)

    @property
    def _most(self) -> np.ndarray:
        """The largest tau for which each listed rule has coefficients."""
        return np.array([len(rule.steps) or np.inf for rule in self._listed])


def _tables(rules: Sequence[LocalRule], tau_max: int) -> tuple[Any, ...]:
    """Tabulate the norms, steps, keep and momentum of distinct rules; see `Work`."""
    steps, norm = np.ones((len(rules), tau_max)), np.zeros((len(rules), tau_max + 1))
    for row, rule in zip(steps, rules, strict=True):
        row[: len(rule.steps)] = rule.steps[:tau_max]
    keep, momentum = np.array([rule[:2] for rule in rules]).T
    m = np.zeros(len(rules))
    for k in range(tau_max):  # the recursion at the top of this file, with unit directions
        m = momentum * m + steps[:, k]
        norm[:, k + 1] = keep * norm[:, k] + m
    return (
        norm,
        None if (steps == 1).all() else steps,
        None if (keep == 1).all() else keep,
        None if (momentum == 0).all() else momentum,
    )


def _require_coefficients(tau: Any, most: Any) -> None:
    """Raise if a client takes more steps than its rule has coefficients."""
    tau, most = map(np.ravel, np.broadcast_arrays(tau, most))
    if (over := tau > most).any():
        raise UserError(
            f"{most[over][0]:.0f} local coefficients are given for up to {tau[over][0]} steps: "
            "give one per step."
        )


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


def constant(tau: int, rules: Rules = LocalRule(), *, rules_every_round: bool = False) -> LocalWork:
    """Every client takes `tau` local steps; `rules` as for `fixed`."""
    return LocalWork(SameForAll(tau), tau, rules, choose=_any_of(rules, rules_every_round))


def fixed(
    taus: Sequence[int],
    rules: Rules = LocalRule(),
    assigned: bool = True,
    *,
    rules_every_round: bool = False,
) -> LocalWork:
    """Client i takes `taus[i]` local steps in every round.

    Args:
        taus: tau of every client.
        rules: the local optimiser of all clients, or a list with one for each.
        assigned: see `LocalWork`.
        rules_every_round: sample one of `rules` uniformly for each client in every round; the list
            may then have any length.

    Example:
        >>> work = fixed([1, 2, 2], rules=[sgd(), momentum(0.5), proximal(0.5)])
        >>> work(jax.random.key(0), 3).norm.tolist()
        [1.0, 2.5, 1.5]
    """
    table = np.asarray(taus)
    if table.ndim != 1 or not len(table) or table.dtype.kind not in "iu" or table.min() < 1:
        raise UserError("Give one whole number of local steps per client, each at least 1.")
    draw, choose = PerClient(table.astype(np.int32)), _any_of(rules, rules_every_round)
    return LocalWork(draw, int(table.max()), rules, assigned, choose)


def uniform(
    low: int,
    high: int,
    rules: Rules = LocalRule(),
    *,
    every_round: bool = False,
    seed: int = 0,
    assigned: bool = True,
    rules_every_round: bool = False,
) -> LocalWork:
    """Client i takes tau_i local steps, sampled uniformly from {low..high}.

    Args:
        low: the fewest steps.
        high: the most steps.
        rules: the local optimiser of all clients, or one for each; see `fixed`.
        every_round: sample tau_i in every round; by default once per run, from `seed`.
        seed: for sampling once per run.
        assigned: see `LocalWork`.
        rules_every_round: see `fixed`.
    """
    if not 1 <= low <= high:
        raise UserError(f"Local steps must satisfy 1 <= low <= high, got {low} and {high}.")

    @keys.constant
    def once(key: jax.Array, n: int) -> np.ndarray:
        return seed_rng(seed, Purpose.LOCAL_STEPS).integers(low, high + 1, n)

    draw = UniformDraw(low, high, Purpose.LOCAL_STEPS_IN_ROUND) if every_round else once
    return LocalWork(draw, high, rules, assigned, _any_of(rules, rules_every_round))


def _any_of(rules: Rules, every_round: bool) -> Draw | None:
    """Return a draw of one of the rules for each client; None without sampling in every round."""
    if not every_round:
        return None
    count = 1 if isinstance(rules, LocalRule) else len(rules)
    return UniformDraw(0, max(0, count - 1), Purpose.LOCAL_RULES)
