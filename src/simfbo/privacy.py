"""Differential privacy of clients: clipped messages, Gaussian noise, and the guarantee.

Each client's message is scaled down to a norm of at most C, channel by channel, and noise of
standard deviation z C times a weight is added: to the sum by the server, or by each client to its
own message. docs/explanation-privacy.md explains the threat model and the cost.
"""

import math
from numbers import Real
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from simfbo.core import trees
from simfbo.core.federation import (
    Client,
    ClientStep,
    Federation,
    View,
    message_of,
    with_message,
)
from simfbo.core.keys import Purpose, secret_key
from simfbo.core.method import Method, WrappedStep, Wrapper, require_unmodified_sums
from simfbo.core.problem import CHANNELS, Point, PyTree, channel
from simfbo.core.sampling import Cohort
from simfbo.errors import UserError, require

__all__ = ["Privacy", "epsilon", "private", "spent"]


class Privacy(NamedTuple):
    """Clipping norms and noise multipliers.

    Attributes:
        clip: C, the largest norm of a client's message, by channel.
        noise: z, the noise multiplier, by channel: the noise has standard deviation z C times the
            largest weight that any client, sampled or not, can have in the sum.
        where: the side that adds the noise: "server", to the sum, if the server is trusted;
            "client", to its own message, so that no other party sees it without noise. The sum of
            P such messages is about sqrt(P) times as noisy.
    """

    clip: Point[float] = Point(1.0, 1.0, 1.0)
    noise: Point[float] = Point(1.0, 1.0, 1.0)
    where: Literal["server", "client"] = "server"


class Protected(WrappedStep):
    """A client step whose message is clipped, with noise if the client adds it.

    The bounds are static: they are not among the numbers that a server sends to a node, so it
    cannot raise them.
    """

    privacy: Privacy = eqx.field(static=True)

    def __call__(self, payload: PyTree, client: Client) -> PyTree:
        reply = self.step(payload, client)
        message = clip(jax.tree.map(jnp.asarray, message_of(reply)), self.privacy.clip)
        if self.privacy.where == "client":
            message = noisy(message, deviations(self.privacy, 1.0), client.key)
        return with_message(reply, message)


class Private(Wrapper):
    """A method with clipped and noisy messages; see `private`."""

    privacy: Privacy = eqx.field(static=True)

    def __check_init__(self) -> None:
        _require_positive(self.privacy)
        require_unmodified_sums(self.inner, "clipping")

    def view(self, state: PyTree, federation: Federation) -> Federation:
        """Return the federation with protected messages."""

        def private_sum(
            step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
        ) -> PyTree:
            total = federation.sum(Protected(step, self.privacy), payload, cohort, key)
            if self.privacy.where == "client":
                return total
            source = secret_key() if federation.secret else key
            weight = _largest_weight(federation, cohort)
            return _noisy(total, deviations(self.privacy, weight), source)

        return View(federation, private_sum, _refuse)

    @property
    def client_steps(self) -> dict[str, ClientStep]:
        """The protected client steps."""
        steps = self.inner.client_steps.items()
        return {name: Protected(step, self.privacy) for name, step in steps}


def private(algorithm: Method, privacy: Privacy) -> Method:
    """Clip the messages of an algorithm and add noise to them.

    Clipping is part of the client step, so it is done on the client. Messages must name their
    channels (`Point(y=...)`); a single number outside them, as ShroFBO's ||a_i||_1, is assumed to
    be independent of the data and is not changed.

    Args:
        algorithm: one with a single exchange per cohort; single messages cannot be gathered.
        privacy: clipping norms and noise multipliers.

    Returns:
        The private method, under the same name.

    Example:
        >>> from simfbo.algorithms import simfbo
        >>> from simfbo.tasks import quadratic
        >>> method = simfbo(quadratic().problem, Point(x=0.05, y=0.2, v=0.1))
        >>> private(method, Privacy(clip=Point(x=0.5, y=1.0, v=1.0))).name
        'SimFBO'
    """
    return Private(algorithm, privacy)


def epsilon(
    exchanges: int, clients: int, cohort: int, noise: Point[float], delta: float = 1e-5
) -> float:
    """Compute epsilon of (epsilon, delta)-differential privacy of a client after some exchanges.

    Neighbouring federations differ in one client's data, so the sum can change by 2 C times a
    weight. Cohorts are sampled without replacement, one for every exchange; all three channels are
    released, and the adversary sees everything sent to clients. Renyi accountant of dp-accounting
    (Wang, Balle, Kasiviswanathan 2019, Theorem 27).

    Args:
        exchanges: the number of exchanges.
        clients: n.
        cohort: P.
        noise: z, by channel.
        delta: the probability with which the bound may fail; choose it well below 1/n.

    Returns:
        epsilon.
    """
    dp, rdp = require("dp_accounting", "privacy"), require("dp_accounting.rdp", "privacy")
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


def spent(algorithm: Method, federation: Federation, exchanges: int, delta: float = 1e-5) -> float:
    """Compute epsilon of a private algorithm on a federation after some exchanges.

    The memory of a client depends on when it was sampled, and automatic steps reuse a cohort
    several times; sampling does not count as protection then.

    Args:
        algorithm: from `private`.
        federation: it runs on.
        exchanges: the number of exchanges: one for every iteration of the methods that this
            accounting covers, and those in which automatic steps measure.
        delta: as in `epsilon`.

    Returns:
        epsilon.

    Example:
        >>> from simfbo import SimulatedFederation, sampling
        >>> from simfbo.algorithms import simfbo
        >>> from simfbo.tasks import quadratic
        >>> task = quadratic(clients=20)
        >>> rules = Privacy(noise=Point(x=4.0, y=4.0, v=4.0))
        >>> method = private(simfbo(task.problem, Point(x=0.05, y=0.2, v=0.1)), rules)
        >>> federation = SimulatedFederation(task.data, sampling.without_replacement(10))
        >>> round(spent(method, federation, 500))
        371
    """
    privacy, n = privacy_of(algorithm), federation.n
    if privacy is None:
        raise UserError("Only a method that `private` returned has an epsilon.")
    noise = privacy.noise
    if algorithm.has_memory or algorithm.asks_again:
        return epsilon(exchanges, n, n, noise, delta)
    return epsilon(exchanges, n, len(federation.cohort(jax.random.key(0)).ids), noise, delta)


def clip(message: PyTree, limits: Point[float]) -> PyTree:
    """Scale down the channels of a message to the given norms.

    Example:
        >>> from simfbo.core.problem import Point
        >>> clipped = clip(Point(x=jnp.array([3.0, 4.0]), y=jnp.array([0.1])), Point(1.0, 1.0, 1.0))
        >>> [f"{number:.2f}" for number in (*clipped.x, *clipped.y)]
        ['0.60', '0.80', '0.10']
    """
    squares = dict.fromkeys(CHANNELS, jnp.zeros(()))
    for path, leaf in jax.tree.leaves_with_path(message):
        if name := channel(path):
            squares[name] += trees.squared_norm(leaf.astype(float))
    norms = {name: jnp.sqrt(square) for name, square in squares.items()}

    def shrink(path: Any, leaf: PyTree) -> PyTree:
        if (name := channel(path)) is None:
            _require_scalar(leaf)
            return leaf
        limit, norm = getattr(limits, name), norms[name]
        return trees.scale(jnp.where(norm > limit, limit / norm, 1.0), leaf)

    return jax.tree.map_with_path(shrink, message)


def _require_scalar(leaf: PyTree) -> None:
    """Raise if a leaf outside the channels is more than a number."""
    if leaf.ndim:
        raise UserError(
            "A message can be protected only if it names its channels: return Point(x=..., y=..., "
            "v=...) from the client step."
        )


def noisy(message: PyTree, deviations: Point[float], key: jax.Array) -> PyTree:
    """Add Gaussian noise of the given standard deviations to the channels of a message."""
    leaves, structure = jax.tree.flatten(message)
    paths = [path for path, _ in jax.tree.leaves_with_path(message)]
    keys = jax.random.split(jax.random.fold_in(key, int(Purpose.NOISE)), len(leaves))

    def add(leaf: PyTree, path: Any, key: jax.Array) -> PyTree:
        if (name := channel(path)) is None:
            return leaf
        size = jnp.asarray(getattr(deviations, name), leaf.dtype)
        return leaf + size * jax.random.normal(key, leaf.shape, leaf.dtype)

    return jax.tree.unflatten(structure, list(map(add, leaves, paths, keys)))


def clipped_again(client_step: ClientStep, message: PyTree) -> PyTree:
    """Clip a decoded message again if the server adds the noise: a codec may increase its norm.

    Messages to which clients added the noise are not changed.
    """
    step: Any = client_step
    while step is not None:  # unwrap the client step
        if isinstance(step, Protected):
            return message if step.privacy.where == "client" else clip(message, step.privacy.clip)
        step = getattr(step, "step", None)
    return message


def deviations(privacy: Privacy, weight: float) -> Point[float]:
    """Return the standard deviations z C times a weight."""
    return Point(*(z * c * weight for z, c in zip(privacy.noise, privacy.clip, strict=True)))


def privacy_of(algorithm: Method) -> Privacy | None:
    """Return the privacy settings of a method; None if it is not private."""
    while isinstance(algorithm, Wrapper):
        if isinstance(algorithm, Private):
            return algorithm.privacy
        algorithm = algorithm.inner
    return None


def _refuse(*_: object) -> PyTree:
    raise UserError("A method that looks at single messages cannot be made private.")


def _largest_weight(federation: Federation, cohort: Cohort) -> Any:
    """Return the largest weight of any client; the cohort's own would reveal who was sampled."""
    possible = federation.n / len(cohort.ids) * jnp.max(jnp.asarray(federation.p))
    largest = jnp.maximum(possible, jnp.max(jnp.asarray(cohort.weights, possible.dtype)))
    return largest if federation.latest is None else largest * federation.latest.factor


_noisy = jax.jit(noisy)


def _require_positive(privacy: Privacy) -> None:
    numbers: tuple[object, ...] = (*privacy.clip, *privacy.noise)
    for number in numbers:
        if not isinstance(number, Real) or not 0 < number < float("inf"):
            raise UserError(
                "Give a positive clipping norm and noise multiplier for each of x, y and v, got "
                f"{number}."
            )
