"""Random draws, each with a separate purpose, in JAX or by a NumPy function on the host.

Every draw is keyed by (seed, round, client, step, purpose), so that results depend neither on the
order of draws nor on the engine or on drop-outs.
"""

import os
from collections.abc import Callable
from enum import IntEnum, unique
from functools import partial
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, Shaped

from simfbo.core.problem import PyTree, Scalar
from simfbo.errors import NeedsHost

_key_data = jax.jit(jax.random.key_data)
D = TypeVar("D", bound=Callable[..., Any])


@unique
class Purpose(IntEnum):
    """The purpose of a random draw. Committed results depend on the numbers: never reuse one."""

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
    # Folded into keys; larger than all numbers of clients and steps:
    COHORT = 2**31 + 1
    LOCAL_STEPS_IN_ROUND = 2**31 + 2
    NOISE = 2**31 + 11
    CODED_UP = 2**31 + 12
    CODED_DOWN = 2**31 + 13
    CLIENT_METRICS = 2**31 + 14
    DROP_OUT = 2**31 + 20
    LOCAL_RULES = 2**31 + 22


def host_rng(key: jax.Array | np.ndarray, purpose: Purpose) -> np.random.Generator:
    """Create a NumPy generator that depends only on `key` (or its data) and `purpose`."""
    words = (key if isinstance(key, np.ndarray) else np.asarray(_key_data(key))).tolist()
    return np.random.default_rng([int(purpose), *words])


def seed_rng(seed: int, purpose: Purpose) -> np.random.Generator:
    """Create a NumPy generator that depends only on `seed` and `purpose`."""
    return np.random.default_rng([int(purpose), seed])


def secret_key() -> jax.Array:
    """Create a key from the operating system's entropy, which cannot be reproduced."""
    like = jax.random.key_data(jax.random.key(0))
    words = np.frombuffer(os.urandom(like.nbytes), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words))


def client_key(key: jax.Array, client: Scalar, occurrence: Scalar) -> jax.Array:
    """Derive a client's key from that of the exchange, independent of the other clients."""
    return jax.random.fold_in(jax.random.fold_in(key, client), occurrence)


def uniform(key: Key[Array, ""], purpose: Purpose, ids: Int[Any, " k"]) -> Float[Array, " k"]:
    """Sample a number from [0, 1) for each client, which depends on key and client only."""
    key = jax.random.fold_in(key, int(purpose))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.asarray(ids))
    return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)


def constant(draw: D) -> D:
    """Declare a NumPy sampler, or another draw on the host, to be the same in every round.

    It is called once, and its result is an input of the compiled rounds.

    Example:
        >>> from simfbo.core.sampling import Cohort
        >>> @constant
        ... def first_two(key, p):
        ...     return Cohort(np.arange(2), np.full(2, 0.5))
    """
    draw.depends_on = "nothing"  # pyright: ignore[reportFunctionMemberAccess]
    return draw


def keyed(draw: Callable[..., Any] | None = None, *, size: int | None = None) -> Any:
    """Declare a NumPy sampler, or another draw on the host, to depend on its arguments only.

    It is called from inside the compiled rounds, which costs about 0.4 ms per call. Undeclared
    draws may be stateful: with them, rounds run one at a time, in order.

    Args:
        draw: the function.
        size: of a sampler's cohorts; without it rounds run one at a time.

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
    """Check if a draw on the host is declared with `constant`."""
    return getattr(draw, "depends_on", None) == "nothing"


FAILED: list[Exception] = []  # errors of draws on the host within compiled rounds


class HostDraw(eqx.Module):
    """A NumPy function (key, ids) -> values, one for each client.

    Attributes:
        kind: of draw, in errors.
        declaration: the decorator that allows calls from compiled rounds.
        dtype: of the values.
        function: the function.
    """

    kind: ClassVar[str] = "draw"
    declaration: ClassVar[str] = "keyed"
    dtype: ClassVar[Any] = np.int32

    function: Callable[..., Any] = eqx.field(static=True)

    def draw(self, key: Key[Array, ""], clients: Any) -> Any:
        """Call the function on the host."""
        return np.asarray(self.function(key, clients), self.dtype)

    def like(self, clients: Any) -> Any:
        """Return the shapes and dtypes of the values; None if the function is undeclared."""
        declared = getattr(self.function, "depends_on", None) is not None
        return jax.ShapeDtypeStruct(clients.shape, self.dtype) if declared else None

    def __call__(self, key: Key[Array, ""], clients: Shaped[Any, " n"]) -> Any:
        """Call the function from inside a compiled program.

        After an error the program continues with zeros, and the engine raises the error in
        `FAILED`.
        """
        like, impl = self.like(clients), jax.random.key_impl(key)
        if like is None:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            raise NeedsHost(
                f"the {self.kind} '{name}' is a NumPy function (declare it with "
                f"sampling.{self.declaration} if it depends on its arguments alone, or write it in "
                "JAX)"
            )

        def call(words: Array, clients: Array) -> Any:
            key = jax.random.wrap_key_data(jnp.asarray(np.asarray(words)), impl=impl)
            try:
                values = self.draw(key, np.asarray(clients))
            except Exception as error:
                FAILED.append(error)
                return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
            return jax.tree.map(lambda leaf, value: np.asarray(value, leaf.dtype), like, values)

        words = jax.random.key_data(key)
        return jax.pure_callback(call, like, words, jnp.asarray(clients), vmap_method="sequential")


class HostValues(eqx.Module):
    """Values drawn on the host, by position in the cohort."""

    values: Shaped[Any, " cohort"]

    def __call__(self, key: Key[Array, ""], ids: Int[Any, " cohort"]) -> Any:
        """Return the values."""
        return self.values


def draw_on_host(draws: PyTree, key: Key[Array, ""], ids: Int[np.ndarray, " cohort"]) -> Any:
    """Replace every `HostDraw` in a pytree of draws by its values."""
    return jax.tree.map(
        lambda draw: HostValues(draw.draw(key, ids)) if isinstance(draw, HostDraw) else draw,
        draws,
        is_leaf=lambda draw: isinstance(draw, HostDraw),
    )
