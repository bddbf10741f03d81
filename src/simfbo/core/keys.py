"""Random draws on the host, each with a purpose of its own.

Every draw is keyed by (seed, round, client, step, purpose), so results do not depend on order, on
the engine or on which clients dropped out. What the server decides (who takes part, how much each
client does) is drawn here rather than inside jit: a full permutation of 10,000 clients costs
milliseconds there and nothing on the host.
"""

import os
from collections.abc import Callable
from enum import IntEnum, unique
from typing import Any, TypeVar

import jax
import numpy as np

from simfbo.core.problem import Scalar

_key_data = jax.jit(jax.random.key_data)
D = TypeVar("D", bound=Callable[..., Any])


@unique
class Purpose(IntEnum):
    """What a random draw is for. Committed results depend on these numbers: never reuse one."""

    COHORT = 1
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
    DROP_OUT = 20
    NETWORKS = 21
    LOCAL_RULES = 22
    # Folded into keys, where no client and no step has such a number:
    NOISE = 2**31 + 11
    CODED_UP = 2**31 + 12
    CODED_DOWN = 2**31 + 13
    CLIENT_METRICS = 2**31 + 14


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


def constant(draw: D) -> D:
    """Declare that a sampler, or any other draw of the server, is the same in every round.

    It is then asked once, and its result is a part of the compiled program. An object that is
    called may instead have an attribute `depends_on = "nothing"`.

    Example:
        >>> from simfbo.core.sampling import Cohort
        >>> @constant
        ... def first_two(key, p):
        ...     return Cohort(np.arange(2), np.full(2, 0.5))
    """
    draw.depends_on = "nothing"  # pyright: ignore[reportFunctionMemberAccess]
    return draw


def keyed(draw: D) -> D:
    """Declare that a sampler, or any other draw of the server, depends on its arguments alone.

    It is then asked for many rounds ahead, and rounds run in compiled blocks. What declares nothing
    may count or look at a clock: it is asked once per round, in order, and rounds run one by one.
    An object that is called may instead have an attribute `depends_on = "key"`.
    """
    draw.depends_on = "key"  # pyright: ignore[reportFunctionMemberAccess]
    return draw


def is_constant(draw: Any) -> bool:
    """Return whether a draw declares that it is the same in every round."""
    return getattr(draw, "depends_on", None) == "nothing"


def is_keyed(draw: Any) -> bool:
    """Return whether a draw declares that it depends on its arguments alone, or on nothing."""
    return getattr(draw, "depends_on", None) in ("key", "nothing")


def secret_key() -> jax.Array:
    """Return a key from the operating system's randomness, which nobody can reproduce."""
    like = jax.random.key_data(jax.random.key(0))
    words = np.frombuffer(os.urandom(like.nbytes), np.uint32)
    return jax.random.wrap_key_data(jax.numpy.asarray(words))
