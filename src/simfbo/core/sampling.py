"""Samplers: the cohort of a round, and its weights.

The weights of a cohort make every weighted sum unbiased:

    E sum_{i in C} w_i z_i = sum_i p_i z_i

A `Sampler` runs in JAX, inside the compiled rounds. It can also be a NumPy function (key, p) ->
Cohort: rounds then run one at a time, unless it is declared with `keyed` or `constant`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from simfbo.core import keys
from simfbo.core.keys import HostDraw, Purpose, constant, is_constant, keyed
from simfbo.errors import UserError

__all__ = [
    "Cohort",
    "Sampler",
    "constant",
    "drop_out",
    "everyone",
    "keyed",
    "with_replacement",
    "without_replacement",
]


class Cohort(NamedTuple):
    """The clients sampled for a round.

    Attributes:
        ids: their numbers, in ascending order.
        weights: w_i, the weight of each client's message in a sum.
    """

    ids: Int[Any, " cohort"]
    weights: Float[Any, " cohort"]

    def is_everyone(self, n: int) -> bool:
        """Check if the cohort has all n clients once; False if that is unknown in a trace."""
        ids = self.ids
        return isinstance(ids, np.ndarray) and np.array_equal(ids, np.arange(n))


class Sampler(eqx.Module):
    """The base class of samplers in JAX.

    Attributes:
        repeats: a cohort can have a client twice.
        static: all cohorts are the same.
    """

    repeats: ClassVar[bool] = False
    static: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, key: Key[Array, ""], p: Float[Any, " n"]) -> Cohort:
        """Sample a cohort, in ascending order, from clients with weights p_i."""


class Everyone(Sampler):
    """All clients; see `everyone`."""

    static = True

    def __call__(self, key: Key[Array, ""], p: Float[Any, " n"]) -> Cohort:
        return Cohort(np.arange(p.shape[0], dtype=np.int32), p)


class Fixed(Sampler):
    """The same clients in every round, with the same weights."""

    static = True

    ids: tuple[int, ...] = eqx.field(static=True)
    weights: Float[Any, " cohort"]

    @property
    def repeats(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(set(self.ids)) < len(self.ids)

    def __call__(self, key: Key[Array, ""], p: Float[Any, " n"]) -> Cohort:
        return Cohort(np.array(self.ids, np.int32), self.weights)


class WithoutReplacement(Sampler):
    """P distinct clients; see `without_replacement`."""

    size: int = eqx.field(static=True)

    def __call__(self, key: Key[Array, ""], p: Float[Any, " n"]) -> Cohort:
        n = p.shape[0]
        if not 1 <= self.size <= n:
            raise UserError(f"A cohort of {self.size} cannot be drawn from {n} clients.")
        if self.size == n:
            return Everyone()(key, p)
        numbers = jax.random.uniform(jax.random.fold_in(key, Purpose.COHORT), (n,), jnp.float32)
        ids = jnp.sort(jax.lax.top_k(numbers, self.size)[1])
        return Cohort(ids, jnp.asarray(p)[ids] * (n / self.size))


class WithReplacement(Sampler):
    """P independent draws; see `with_replacement`."""

    repeats = True

    size: int = eqx.field(static=True)

    def __call__(self, key: Key[Array, ""], p: Float[Any, " n"]) -> Cohort:
        n = p.shape[0]
        if self.size < 1:
            raise UserError(f"A cohort of {self.size} cannot be drawn from {n} clients.")
        key = jax.random.fold_in(key, Purpose.COHORT)
        ids = jnp.sort(jax.random.randint(key, (self.size,), 0, n, jnp.int32))
        return Cohort(ids, jnp.asarray(p)[ids] * (n / self.size))


class HostSampler(HostDraw, Sampler):
    """A NumPy function (key, p) -> (ids, weights) as a sampler.

    Attributes:
        size: of its cohorts, if it is declared with `keyed(size=...)`.
    """

    kind = "sampler"
    declaration = "keyed(size=...)"
    repeats = True

    size: int | None = eqx.field(static=True, default=None)

    def draw(self, key: Key[Array, ""], clients: Float[np.ndarray, " n"]) -> Cohort:
        """Call the function with weights p_i; return its cohort in ascending order."""
        ids, weights = map(np.asarray, self.function(key, clients))
        if not len(ids):
            raise UserError("The sampler returned no clients: a cohort needs at least one.")
        if weights.shape != ids.shape:
            raise UserError("The sampler must return one weight per client.")
        if self.size not in (None, len(ids)):
            raise UserError(
                f"The sampler drew {len(ids)} clients: it was declared to draw {self.size}."
            )
        order = np.argsort(ids, kind="stable")
        return Cohort(ids[order].astype(np.int32), weights[order])

    def like(self, clients: Any) -> Cohort | None:
        """Return the shapes of a cohort if its size is declared."""
        if self.size is None:
            return None
        dtypes = jnp.int32, clients.dtype
        return Cohort(*(jax.ShapeDtypeStruct((self.size,), dtype) for dtype in dtypes))


AnySampler = Sampler | Callable[[jax.Array, np.ndarray], Cohort]


def as_sampler(sampler: AnySampler, p: Float[np.ndarray, " n"]) -> Sampler:
    """Wrap a NumPy function as a sampler; a constant one is called immediately."""
    if isinstance(sampler, Sampler):
        return sampler
    on_host = HostSampler(sampler, getattr(sampler, "size", None))
    if not is_constant(sampler):
        return on_host
    cohort = on_host.draw(jax.random.key(0), p)
    return Fixed(tuple(cohort.ids.tolist()), cohort.weights)


class DropOut(eqx.Module):
    """Each client fails to reply with a probability; see `drop_out`."""

    rate: float

    def __call__(self, key: Key[Array, ""], ids: Int[Any, " cohort"]) -> Bool[Array, " cohort"]:
        return keys.uniform(key, Purpose.DROP_OUT, ids) < self.rate


class HostAbsence(HostDraw):
    """Drop-outs by a NumPy function (key, ids) -> bool for each client."""

    dtype = bool


Absence = DropOut | HostDraw


def as_absence(absence: Any) -> Absence | None:
    """Wrap a NumPy function (key, ids) -> bool as drop-outs."""
    return absence if absence is None or isinstance(absence, Absence) else HostAbsence(absence)


def everyone() -> Sampler:
    """All clients, with weights p_i."""
    return Everyone()


def without_replacement(size: int) -> Sampler:
    """P = `size` distinct clients, sampled uniformly, with weights (n/P) p_i.

    The variance of the weighted sum is (n-P)/(P(n-1)) times that between clients; zero for P = n.

    Example:
        >>> import jax, numpy as np
        >>> cohort = without_replacement(2)(jax.random.key(0), np.full(4, 0.25))
        >>> cohort.weights.tolist()
        [0.5, 0.5]
    """
    return WithoutReplacement(size)


def with_replacement(size: int) -> Sampler:
    """P = `size` independent uniform draws, each with weight (n/P) p_i.

    The variance of the weighted sum is 1/P times that between clients.
    """
    return WithReplacement(size)


def drop_out(rate: float) -> DropOut:
    """Simulate drop-outs: each sampled client fails to reply with probability `rate`.

    A drop-out depends only on the exchange and the client. Pass the result as `absence` to an
    engine.

    Example:
        >>> import jax, numpy as np
        >>> drop_out(0.5)(jax.random.key(0), np.arange(4)).tolist()
        [True, False, True, True]
    """
    if not 0 <= rate < 1:
        raise UserError(f"The rate of drop-outs must lie in [0, 1), got {rate}.")
    return DropOut(rate)
