"""Random draws, each with a purpose of its own, in JAX or by a NumPy function on the host.

Every draw is keyed by (seed, round, client, step, purpose), so results do not depend on order, on
the engine or on which clients dropped out.
"""

import os
from collections.abc import Callable
from enum import IntEnum, unique
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, Shaped

from simfbo.core.problem import Scalar
from simfbo.errors import NeedsHost

_key_data = jax.jit(jax.random.key_data)
D = TypeVar("D", bound=Callable[..., Any])


@unique
class Purpose(IntEnum):
    """What a random draw is for. Committed results depend on these numbers: never reuse one."""

    LOCAL_STEPS = 2
    PARTITION = 3
    LEVELS = 4
    COEFFICIENTS = 5
    SCATTER = 6
    SERIES_LENGTH = 7
    LANCZOS_START = 8
    EVALUATION_ROWS = 9
    SYNTHETIC = 10
    HELD_OUT = 11
    FOLDS = 12
    WRONG_LABELS = 13
    TRUST_NETWORK = 14
    CLEAN_ROWS = 15
    LONG_TAIL = 16
    ROTATED = 17
    CHAINS = 18
    TRUSTED_ROWS = 19
    NETWORKS = 21
    # Folded into keys, where no client and no step has such a number:
    COHORT = 2**31 + 1
    LOCAL_STEPS_IN_ROUND = 2**31 + 2
    NOISE = 2**31 + 11
    CODED_UP = 2**31 + 12
    CODED_DOWN = 2**31 + 13
    CLIENT_METRICS = 2**31 + 14
    DROP_OUT = 2**31 + 20
    LOCAL_RULES = 2**31 + 22


def host_rng(key: jax.Array | np.ndarray, purpose: Purpose) -> np.random.Generator:
    """Return a NumPy generator that depends only on `key`, or its data, and on `purpose`."""
    words = (key if isinstance(key, np.ndarray) else np.asarray(_key_data(key))).tolist()
    return np.random.default_rng([int(purpose), *words])


def seed_rng(seed: int, purpose: Purpose) -> np.random.Generator:
    """Return a NumPy generator that depends only on `seed` and `purpose`."""
    return np.random.default_rng([int(purpose), seed])


def client_key(key: jax.Array, client: Scalar, occurrence: Scalar) -> jax.Array:
    """Return a client's key: it depends on the exchange and the client, never on who else came."""
    return jax.random.fold_in(jax.random.fold_in(key, client), occurrence)


def uniform(key: Key[Array, ""], purpose: Purpose, ids: Int[Any, " k"]) -> Float[Array, " k"]:
    """Draw a number from [0, 1) for each client, which depends on nothing but key and client."""
    key = jax.random.fold_in(key, int(purpose))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.asarray(ids))
    return jax.vmap(lambda own: jax.random.uniform(own, (), jnp.float32))(keys)


def constant(draw: D) -> D:
    """Declare that a NumPy sampler, or another draw on the host, is the same in every round.

    It is then called once, and its result is an input of the compiled rounds.

    Example:
        >>> from simfbo.core.sampling import Cohort
        >>> @constant
        ... def first_two(key, p):
        ...     return Cohort(np.arange(2), np.full(2, 0.5))
    """
    draw.depends_on = "nothing"  # pyright: ignore[reportFunctionMemberAccess]
    return draw


def keyed(draw: Callable[..., Any] | None = None, *, size: int | None = None) -> Any:
    """Declare that a NumPy sampler, or another draw on the host, depends on its arguments alone.

    It is then called from inside the compiled rounds, which costs about 0.4 ms each time. A draw
    that declares nothing may count or look at a clock: rounds run one at a time, in order.

    Args:
        draw: the function.
        size: of the cohorts that a sampler draws; without it rounds run one at a time.

    Example:
        >>> from simfbo.core.sampling import Cohort
        >>> @keyed(size=2)
        ... def two(key, p):
        ...     first = int(jax.random.key_data(key)[-1]) % (len(p) - 1)
        ...     return Cohort(np.array([first, first + 1]), np.full(2, 0.5))
    """
    if draw is None:
        return partial(keyed, size=size)
    draw.depends_on = "key"  # pyright: ignore[reportFunctionMemberAccess]
    draw.size = size  # pyright: ignore[reportFunctionMemberAccess]
    return draw


def is_constant(draw: Any) -> bool:
    """Return whether a draw declares that it is the same in every round."""
    return getattr(draw, "depends_on", None) == "nothing"


def is_keyed(draw: Any) -> bool:
    """Return whether a draw declares that it depends on its arguments alone, or on nothing."""
    return getattr(draw, "depends_on", None) in ("key", "nothing")


def like_declared(of: Any, draw: D) -> D:
    """Return a draw, declared as another one is."""
    draw.depends_on = getattr(of, "depends_on", None)  # pyright: ignore[reportFunctionMemberAccess]
    draw.__name__ = getattr(of, "__name__", type(of).__name__)
    return draw


class HostDraw(eqx.Module):
    """A NumPy function that draws a value for each client: (key, ids) -> values.

    Attributes:
        function: the function.
        dtype: of its values.
    """

    function: Callable[..., Any] = eqx.field(static=True)
    dtype: Any = eqx.field(static=True, default=np.int32)

    def draw(self, key: Key[Array, ""], ids: Int[np.ndarray, " cohort"]) -> np.ndarray:
        """Call the function."""
        return np.asarray(self.function(key, ids), self.dtype)

    def __call__(self, key: Key[Array, ""], ids: Int[Any, " cohort"]) -> Array:
        """Call the function from inside a compiled program."""
        if not is_keyed(self.function):
            raise needs_host("draw", self.function, "keyed")
        like = jax.ShapeDtypeStruct(ids.shape, self.dtype)
        return call_host(self.draw, like, key, jnp.asarray(ids))


class Given(eqx.Module):
    """Values that were drawn on the host, by position in the cohort."""

    values: Shaped[Any, " cohort"]

    def __call__(self, key: Key[Array, ""], ids: Int[Any, " cohort"]) -> Any:
        """Return the values."""
        return self.values


def given(draw: Any, key: Key[Array, ""], ids: Int[np.ndarray, " cohort"]) -> Any:
    """Return a draw whose values are known, if it takes place on the host."""
    return Given(draw.draw(key, ids)) if isinstance(draw, HostDraw) else draw


def needs_host(kind: str, function: Any, how: str) -> NeedsHost:
    """Return the reason why rounds with a NumPy function run one at a time."""
    name = getattr(function, "__name__", type(function).__name__)
    return NeedsHost(
        f"the {kind} '{name}' is a NumPy function (declare it with sampling.{how} if it depends on "
        "its arguments alone, or write it in JAX)"
    )


FAILED: list[Exception] = []  # errors of NumPy functions called from a program


def call_host(function: Callable[..., Any], like: Any, key: Key[Array, ""], *rest: Array) -> Any:
    """Call a NumPy function of a key and arrays from inside a compiled program.

    If it fails, the program goes on with zeros, and the engine raises the error from `FAILED`.
    """
    impl = jax.random.key_impl(key)

    def call(words: Array, *rest: Array) -> Any:
        own = jax.random.wrap_key_data(jnp.asarray(np.asarray(words)), impl=impl)
        try:
            found = function(own, *map(np.asarray, rest))
        except Exception as error:
            FAILED.append(error)
            return jax.tree.map(lambda of: np.zeros(of.shape, of.dtype), like)
        return jax.tree.map(lambda of, value: np.asarray(value, of.dtype), like, found)

    return jax.pure_callback(call, like, jax.random.key_data(key), *rest, vmap_method="sequential")


def secret_key() -> jax.Array:
    """Return a key from the operating system's randomness, which nobody can reproduce."""
    like = jax.random.key_data(jax.random.key(0))
    words = np.frombuffer(os.urandom(like.nbytes), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words))
