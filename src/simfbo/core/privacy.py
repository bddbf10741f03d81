"""Differential privacy of clients: clipped messages, Gaussian noise, and what they guarantee.

Every client's part in a sum is scaled down to a norm of at most C, channel by channel, and noise of
standard deviation z C times a weight is added: to the sum by the server, or by each client to its
own message. docs/explanation-privacy.md says what this protects, from whom, and what it costs.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from simfbo.core import trees
from simfbo.core.aggregation import CHANNELS, channel
from simfbo.core.federation import Algorithm, Client, ClientWork, Federation
from simfbo.core.keys import secret_key
from simfbo.core.problem import PyTree
from simfbo.core.sampling import Cohort
from simfbo.core.views import Verb, View
from simfbo.errors import UserError

_NOISE = 2**31 + 11  # purpose of a key: noise; no client and no step has such a number


class Channels(NamedTuple):
    """A number for each channel."""

    x: float = 1.0
    y: float = 1.0
    v: float = 1.0


class Privacy(NamedTuple):
    """Clipping and noise.

    Attributes:
        clip: C, the largest norm of a client's message, by channel.
        noise: z, the noise multiplier: noise has standard deviation z C times the largest weight
            that any client can have in the sum, drawn or not.
        where: who adds the noise. The server, to the sum: it is trusted with the messages. Or every
            client, to its own message: nobody else ever sees it clean, and the sum of P of them is
            about sqrt(P) times as noisy.
    """

    clip: Channels = Channels()
    noise: Channels = Channels()
    where: Literal["server", "client"] = "server"


def private(algorithm: Algorithm, privacy: Privacy) -> Algorithm:
    """Return the algorithm with its messages clipped and noise added to them.

    The clipping is part of the client's work, so it happens wherever that runs. Messages must name
    their channels (`Point(y=...)`); a single number outside them, as ShroFBO's ||a_i||_1, is taken
    to depend on no data and stays as it is.

    Args:
        algorithm: any.
        privacy: how.

    Returns:
        The private algorithm, under the same name.

    Example:
        >>> from simfbo import Steps, simfbo
        >>> from simfbo.tasks import quadratic
        >>> method = simfbo(quadratic().problem, Steps(y=0.2, v=0.1, x=0.05))
        >>> private(method, Privacy(clip=Channels(x=0.5))).name
        'SimFBO'
    """
    _require_positive(privacy)
    works = {work: _protected(work, privacy) for work in algorithm.works}

    def round(state: Any, federation: Federation, key: jax.Array) -> Any:
        return algorithm.round(state, View(federation, _verb(federation, works, privacy)), key)

    return algorithm._replace(round=round, works=tuple(works.values()))


def epsilon(
    exchanges: int, clients: int, cohort: int, noise: Channels, delta: float = 1e-5
) -> float:
    """Return epsilon of (epsilon, delta)-differential privacy of a client after some exchanges.

    Neighbouring federations differ in one client's data, so the sum can change by 2 C times a
    weight. Cohorts are drawn without replacement, one for every exchange, all three channels are
    released, and everything sent down until then is seen. Renyi accountant of dp-accounting
    (Wang, Balle, Kasiviswanathan 2019, Theorem 27).

    Args:
        exchanges: how many.
        clients: n.
        cohort: P.
        noise: z by channel.
        delta: the probability with which the bound may fail; well below 1/n.

    Returns:
        epsilon.
    """
    try:
        import dp_accounting as dp
        from dp_accounting import rdp
    except ImportError:
        raise UserError("Install dp-accounting for this: pip install 'simfbo[privacy]'.") from None
    if not 0 < cohort <= clients or not min(noise) > 0 or not 0 < delta < 1:
        raise UserError("epsilon needs 0 < cohort <= clients, noise above 0 and 0 < delta < 1.")
    if exchanges < 1:
        return 0.0
    if min(noise) < 1e-3:
        return math.inf  # beyond what the accountant can compute, and any use
    together = sum(z**-2 for z in noise) ** -0.5
    gauss = dp.GaussianDpEvent(together / 2)
    event = dp.SampledWithoutReplacementDpEvent(clients, cohort, gauss)
    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    accountant.compose(event, exchanges)
    return float(accountant.get_epsilon(delta))


def clip(message: PyTree, limits: Channels) -> Any:
    """Return a message whose channels are scaled down to the given norms.

    Example:
        >>> from simfbo.core.problem import Point
        >>> clipped = clip(Point(x=jnp.array([3.0, 4.0]), y=jnp.array([0.1])), Channels())
        >>> [f"{number:.2f}" for number in (*clipped.x, *clipped.y)]
        ['0.60', '0.80', '0.10']
    """
    squares = dict.fromkeys(CHANNELS, jnp.zeros(()))
    for path, leaf in jax.tree.leaves_with_path(message):
        if name := channel(path):
            squares[name] += trees.squared_norm(leaf.astype(float))
    norms = {name: jnp.sqrt(square) for name, square in squares.items()}

    def shrink(path: Any, leaf: Any) -> Any:
        if (name := channel(path)) is None:
            _require_scalar(leaf)
            return leaf
        limit, norm = getattr(limits, name), norms[name]
        return trees.scale(jnp.where(norm > limit, limit / norm, 1.0), leaf)

    return jax.tree.map_with_path(shrink, message)


def _require_scalar(leaf: Any) -> None:
    """Raise if what belongs to no channel is more than a number."""
    if leaf.ndim:
        raise UserError(
            "A message can be protected only if it names its channels: return Point(x=..., y=..., "
            "v=...) from the client's work."
        )


def noisy(message: PyTree, deviations: Channels, key: jax.Array) -> Any:
    """Return a message with Gaussian noise of the given standard deviations on its channels."""
    leaves, structure = jax.tree.flatten(message)
    paths = [path for path, _ in jax.tree.leaves_with_path(message)]
    keys = jax.random.split(jax.random.fold_in(key, _NOISE), len(leaves))

    def add(leaf: Any, path: Any, key: jax.Array) -> Any:
        if (name := channel(path)) is None:
            return leaf
        size = jnp.asarray(getattr(deviations, name), leaf.dtype)
        return leaf + size * jax.random.normal(key, leaf.shape, leaf.dtype)

    return jax.tree.unflatten(structure, list(map(add, leaves, paths, keys)))


def _protected(work: ClientWork, privacy: Privacy) -> ClientWork:
    """Return the work with its message clipped, and with noise where the client adds it."""

    @functools.wraps(work)
    def protected(payload: PyTree, client: Client) -> Any:
        message = clip(jax.tree.map(jnp.asarray, work(payload, client)), privacy.clip)
        if privacy.where == "server":
            return message
        return noisy(message, deviations(privacy, 1.0), client.key)

    return protected


def deviations(privacy: Privacy, weight: Any) -> Channels:
    """Return the standard deviations z C times a weight."""
    return Channels(*(z * c * weight for z, c in zip(privacy.noise, privacy.clip, strict=True)))


def _verb(federation: Federation, works: dict[ClientWork, ClientWork], privacy: Privacy) -> Verb:
    """Return the verb that swaps in the protected works and adds the server's noise."""

    def aggregate(work: ClientWork, payload: PyTree, cohort: Cohort, key: jax.Array) -> Any:
        if cohort.weights.ndim > 1:
            raise UserError("A method that looks at single messages cannot be made private.")
        total = federation.aggregate(works[work], payload, cohort, key)
        if privacy.where == "client":
            return total
        source = secret_key() if federation.secret else key
        return _noisy(total, deviations(privacy, _largest_weight(federation, cohort)), source)

    return aggregate


def _largest_weight(federation: Federation, cohort: Cohort) -> float:
    """Return the largest weight of any client; that of the cohort alone would tell who came."""
    possible = federation.n / len(cohort.ids) * federation.p.max()
    latest = federation.latest
    return max(possible, cohort.weights.max()) * (1.0 if latest is None else latest.factor)


_noisy = jax.jit(noisy)


def _require_positive(privacy: Privacy) -> None:
    for number in (*privacy.clip, *privacy.noise):
        if not 0 < number < float("inf"):
            raise UserError(f"Clipping norms and noise multipliers must be positive, got {number}.")
