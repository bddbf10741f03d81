"""Local work: how many steps tau_i each client takes, and by which rule.

A rule is a local optimiser; clients may follow different ones. A client's steps follow a linear
recursion. With direction d_k at step k and coefficient c_k,

    m <- momentum * m + c_k d_k,     q <- keep * q + m,     iterate = start - eta * q

so that what it sends is  q = sum_k a_k d_k  with

    a_k = c_k sum_{j=k}^{tau-1} keep^(tau-1-j) momentum^(j-k).

Plain SGD has a_k = 1; a proximal term a_k = (1-alpha)^(tau-1-k); momentum m
a_k = (1 - m^(tau-k)) / (1-m). The path is the true one of the local optimiser, and a only weighs
and normalises (Wang et al. 2020, FedNova). `coefficients` gives any a_k, with the paper's own path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from simfbo.core import keys
from simfbo.core.keys import Given, HostDraw, Purpose, seed_rng
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
    jax.tree_util.register_dataclass,
    data_fields=["tau", "steps", "norm", "keep", "momentum"],
    meta_fields=["plain"],
)
@dataclass(frozen=True)
class LocalPlan:
    """How much local work is done: by all clients (with a leading axis), or by one.

    Attributes:
        tau: number of local steps.
        steps: c_k, zero from step tau on.
        norm: ||a||_1.
        keep: how much of q is kept at each step; None where every client keeps all of it.
        momentum: the momentum within a round; None where no client has any.
        plain: whether all clients take plain gradient steps.
    """

    tau: Int[Any, "*clients"]
    steps: Float[Any, "*clients most"]
    norm: Float[Any, "*clients"]
    keep: Float[Any, "*clients"] | None
    momentum: Float[Any, "*clients"] | None
    plain: bool

    def __getitem__(self, clients: Any) -> LocalPlan:
        return jax.tree.map(lambda a: a[clients], self)


class RuleTable(NamedTuple):
    """Different rules, a row for each; what is the same for plain steps is None.

    Attributes:
        norm: ||a||_1 of every rule for every tau from 0 to the largest.
        steps: c_k of every rule; None where all are one.
        keep: see `LocalRule`; None where all are one.
        momentum: see `LocalRule`; None where all are zero.
    """

    norm: Float[Any, "rules taus"]
    steps: Float[Any, "rules most"] | None
    keep: Float[Any, " rules"] | None
    momentum: Float[Any, " rules"] | None

    def plan(self, tau: Int[Any, "*clients"], rule: Int[Any, "*clients"]) -> LocalPlan:
        """Return the plan for numbers of local steps and rows of this table."""
        taken = np.arange(self.norm.shape[-1] - 1, dtype=np.int32) < tau[..., None]
        steps, keep, momentum = (None if a is None else a[rule] for a in self[1:])
        weights = taken.astype(self.norm.dtype)
        plain = steps is keep is momentum is None
        steps = weights if steps is None else weights * steps
        return LocalPlan(tau, steps, self.norm[rule, tau], keep, momentum, plain)


@lru_cache
def _table(rules: tuple[LocalRule, ...], tau_max: int) -> RuleTable:
    """Return the table of different rules."""
    steps = np.ones((len(rules), tau_max))
    for row, rule in zip(steps, rules, strict=True):
        row[: len(rule.steps)] = rule.steps[:tau_max]
    norm = np.stack([_norms(*given) for given in zip(rules, steps, strict=True)])
    keep, momentum = np.array([rule[:2] for rule in rules]).T
    return RuleTable(
        norm,
        None if (steps == 1).all() else steps,
        None if (keep == 1).all() else keep,
        None if (momentum == 0).all() else momentum,
    )


def _norms(rule: LocalRule, steps: np.ndarray) -> np.ndarray:
    """Return ||a||_1 for every tau: q of the recursion on top, all directions being one."""
    norms, m = [0.0], 0.0
    for step in steps:
        m = rule.momentum * m + step
        norms.append(rule.keep * norms[-1] + m)
    return np.array(norms)


class SameForAll(eqx.Module):
    """The same number for all clients, a constant of the program: loops have a fixed length."""

    number: int = eqx.field(static=True)

    def __call__(self, key: Key[Array, ""], ids: Int[Any, " cohort"]) -> np.int32:
        return np.int32(self.number)


class PerClient(eqx.Module):
    """A number for each client, the same in every round."""

    numbers: Int[Any, " n"]

    def __call__(self, key: Key[Array, ""], ids: Int[Any, " cohort"]) -> Int[Any, " cohort"]:
        return self.numbers[ids]


class UniformDraw(eqx.Module):
    """A number from {low .. high} for each client, drawn uniformly in every exchange."""

    low: int = eqx.field(static=True)
    high: int = eqx.field(static=True)
    purpose: Purpose = eqx.field(static=True)

    def __call__(self, key: Key[Array, ""], ids: Int[Any, " cohort"]) -> Int[Array, " cohort"]:
        numbers = keys.uniform(key, self.purpose, ids) * (self.high + 1 - self.low)
        return self.low + jnp.floor(numbers).astype(jnp.int32)


Draw = SameForAll | PerClient | UniformDraw | HostDraw | Given
Rules = LocalRule | Sequence[LocalRule]


class Work(eqx.Module):
    """The local work of n clients, as the compiled rounds draw it.

    Attributes:
        tau: draws numbers of local steps.
        rule: draws which of the listed rules a client follows.
        rows: the row of each listed rule in the table.
        table: the different rules.
        assigned: see `LocalWork`.
    """

    tau: Draw
    rule: Draw
    rows: Int[Any, " listed"]
    table: RuleTable
    assigned: bool = eqx.field(static=True)

    @property
    def draws(self) -> tuple[Draw, Draw]:
        """Return what is drawn."""
        return self.tau, self.rule

    def plan(self, key: Key[Array, ""], ids: Int[Any, " cohort"]) -> LocalPlan:
        """Draw the plan of some clients, without a leading axis if all clients have the same."""
        tau, rule = self.tau(key, ids), self.rows[self.rule(key, ids)]
        if np.shape(tau) != np.shape(rule):
            arrays = (jnp if isinstance(rule, jax.Array) else np).broadcast_arrays
            tau, rule = arrays(tau, rule)
        return self.table.plan(tau, rule)

    def mean_norm(self, key: Key[Array, ""], p: Float[Any, " n"]) -> Any:
        """Return rho = sum_j p_j ||a_j||_1 for the exchange with a key."""
        norm = self.plan(key, np.arange(p.shape[0], dtype=np.int32)).norm
        return norm if jnp.ndim(norm) == 0 else p @ norm

    def given(self, key: Key[Array, ""], ids: Int[np.ndarray, " cohort"]) -> Work:
        """Return the work with the values of those draws that take place on the host."""
        tau, rule = (keys.given(draw, key, ids) for draw in (self.tau, self.rule))
        return replace(self, tau=tau, rule=rule)


@dataclass(frozen=True)
class LocalWork:
    """How many local steps each client takes, and by which rule.

    Make one with `constant`, `fixed` or `uniform`.

    Attributes:
        draw: (key, n) -> tau of every client, by a NumPy function; see `simfbo.sampling.keyed`.
        tau_max: the largest tau that can be drawn.
        rules: the local optimiser of all clients, or one for each.
        assigned: whether the server assigns the local work, and so knows all of it in advance.
            Otherwise it learns ||a_i||_1 only from the clients that reply.
        choose: (key, n) -> which of `rules` every client follows in this exchange, as positions in
            the list, see `simfbo.sampling.keyed`; by default client i follows the i-th.
    """

    draw: Draw | Callable[[jax.Array, int], np.ndarray]
    tau_max: int
    rules: Rules = LocalRule()
    assigned: bool = True
    choose: Draw | Callable[[jax.Array, int], np.ndarray] | None = None

    def __post_init__(self) -> None:
        if self.tau_max < 1:
            raise UserError(f"Clients take at least one local step, got {self.tau_max}.")
        rules = self._listed
        if not rules or not all(isinstance(rule, LocalRule) for rule in rules):
            raise UserError("Local rules are such as local_work.momentum(0.9): give at least one.")
        if self.tau_max > (most := max(map(_most, rules))):
            raise _too_few(most, self.tau_max)

    def __call__(self, key: jax.Array, n: int, clients: Any = slice(None)) -> LocalPlan:
        """Return the plan of all n clients, or of some, for the exchange of `key`."""
        everyone = np.arange(n, dtype=np.int32)
        plan = self.resolved(n).given(key, everyone).plan(key, everyone)
        if not np.ndim(plan.tau):
            plan = jax.tree.map(lambda a: np.broadcast_to(a, (n, *np.shape(a))), plan)
        return jax.tree.map(np.asarray, plan)[clients]

    def resolved(self, n: int) -> Work:
        """Return the local work of n clients; what is the same in every round is drawn now."""
        listed = self._listed
        if self.choose is None and len(listed) not in (1, n):
            raise UserError(
                f"{len(listed)} local rules are given for {n} clients: give one for each, or one "
                "rule for all."
            )
        different = tuple(dict.fromkeys(listed))
        rows = np.array([different.index(rule) for rule in listed], np.int32)
        rule = self._choice(n)
        tau = self._resolved(self.draw, n, self._checked)
        if isinstance(tau, SameForAll | PerClient) and isinstance(rule, SameForAll | PerClient):
            key, everyone = jax.random.key(0), np.arange(n, dtype=np.int32)
            most = np.array([_most(one) for one in listed])[rule(key, everyone)]
            steps = np.broadcast_to(tau(key, everyone), n)
            if (steps > most).any():
                first = int(np.argmax(steps > most))
                raise _too_few(np.broadcast_to(most, n)[first], steps[first])
        elif self.tau_max > (least := min(map(_most, listed))):
            raise _too_few(least, self.tau_max)
        return Work(tau, rule, rows, _table(different, self.tau_max), self.assigned)

    def _choice(self, n: int) -> Draw:
        """Return the draw of the clients' rules."""
        count = len(self._listed)
        if self.choose is None:
            return SameForAll(0) if count == 1 else PerClient(np.arange(n, dtype=np.int32))

        def checked(chosen: np.ndarray, n: int) -> np.ndarray:
            if chosen.shape != (n,) or chosen.min() < 0 or chosen.max() >= count:
                raise UserError(
                    f"Choose one of {count} local rules for each of {n} clients, by positions from "
                    f"0 to {count - 1}."
                )
            return chosen

        return self._resolved(self.choose, n, checked)

    def _checked(self, tau: np.ndarray, n: int) -> np.ndarray:
        if tau.min() < 1 or tau.max() > self.tau_max:
            raise UserError(f"Numbers of local steps must lie between 1 and {self.tau_max}.")
        return tau

    @staticmethod
    def _resolved(draw: Any, n: int, checked: Callable[[np.ndarray, int], np.ndarray]) -> Draw:
        """Return a draw for compiled rounds: of a NumPy function, its values or a call."""
        if isinstance(draw, PerClient):  # equal numbers give loops of a fixed length
            numbers = draw.numbers
            if len(numbers) != n:
                count = len(numbers)
                raise UserError(f"{count} numbers of local steps are given for {n} clients.")
            return SameForAll(int(numbers[0])) if (numbers == numbers[0]).all() else draw
        if isinstance(draw, SameForAll | UniformDraw):
            return draw
        if keys.is_constant(draw):
            numbers = checked(np.asarray(draw(jax.random.key(0), n), np.int32), n)
            return LocalWork._resolved(PerClient(numbers), n, checked)

        def some(key: jax.Array, ids: np.ndarray) -> np.ndarray:
            return checked(np.asarray(draw(key, n), np.int32), n)[ids]

        return HostDraw(keys.like_declared(draw, some))

    @property
    def _listed(self) -> tuple[Any, ...]:
        """Return the rules as a tuple, whatever was given."""
        rules: Any = self.rules
        several = isinstance(rules, Sequence) and not isinstance(rules, LocalRule)
        return tuple(rules) if several else (rules,)


def _most(rule: LocalRule) -> float:
    """Return how many steps a rule has coefficients for."""
    return len(rule.steps) or np.inf


def _too_few(given: float, steps: int) -> UserError:
    return UserError(
        f"{given:.0f} local coefficients are given for up to {steps} steps: give one per step."
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
        rules_every_round: in every round each client draws one of `rules`, uniformly, instead of
            following its own; the list may then have any length.

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
    """Client i takes tau_i local steps, drawn uniformly from {low..high}.

    Args:
        low: the fewest steps.
        high: the most steps.
        rules: the local optimiser of all clients, or one for each; see `fixed`.
        every_round: draw tau_i again in every round; by default once per run, from `seed`.
        seed: of the draw once per run.
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
    """Return the draw of one of the rules for each client, if it takes place in every round."""
    if not every_round:
        return None
    count = 1 if isinstance(rules, LocalRule) else len(rules)
    return UniformDraw(0, max(0, count - 1), Purpose.LOCAL_RULES)
