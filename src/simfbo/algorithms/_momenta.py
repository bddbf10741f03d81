"""Client momenta, for robust aggregation: Karimireddy, He, Jaggi, "Learning from History for
Byzantine Robust Optimization", ICML 2021; for bilevel problems BR-FedBiM, ICLR 2026.

Honest messages that scatter less from round to round leave less room for hostile ones.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from simfbo.core import trees
from simfbo.core.federation import (
    Algorithm,
    Client,
    ClientStep,
    Federation,
    Verb,
    View,
    WithMemory,
    message_of,
    require_exact_sums,
)
from simfbo.core.problem import Point, PyTree, point_of
from simfbo.errors import UserError


class Momenta(NamedTuple):
    """What a client keeps: a momentum per client step and channel, and what else it remembers."""

    momenta: dict[str, Point[PyTree]]
    begun: dict[str, PyTree]
    own: PyTree


def with_momenta(algorithm: Algorithm, theta: float = 0.1) -> Algorithm:
    """Let the clients of an algorithm send momenta in place of their messages.

        m_i = (1 - theta) m_i + theta z_i,     m_i = z_i the first time

    by channel, kept in the client's memory. What a message carries besides x, y and v, as ShroFBO's
    ||a_i||_1, is sent as it is.

    Args:
        algorithm: whose messages name their channels.
        theta: weight of the new message, above 0; 1 changes nothing.

    Returns:
        The algorithm, under the same name.

    Example:
        >>> from simfbo.algorithms import simfbo
        >>> from simfbo.tasks import quadratic
        >>> method = simfbo(quadratic().problem, Point(x=0.05, y=0.2, v=0.1))
        >>> with_momenta(method, 0.1).name
        'SimFBO'
    """
    if not 0 < theta <= 1:
        raise UserError(f"theta must lie above 0 and be at most 1, got {theta}.")
    if theta < 1:
        require_exact_sums(algorithm, "a moving average")
    steps = {step: _smoothed(step, theta) for step in algorithm.client_steps}
    names = [step.__name__ for step in steps]

    def round(state: PyTree, federation: Federation, key: jax.Array) -> PyTree:
        view = View(federation, _other(federation.sum, steps), _other(federation.gather, steps))
        return algorithm.round(state, view, key)

    def memory(x0: PyTree, y0: PyTree) -> Momenta:
        own = None if algorithm.memory is None else algorithm.memory(x0, y0)
        x, y = trees.host_zeros(trees.on_device((x0, y0)))
        begun = trees.host_zeros(jnp.zeros(()))
        return Momenta(dict.fromkeys(names, Point(x, y, y)), dict.fromkeys(names, begun), own)

    own_y = algorithm.own_y
    return algorithm._replace(
        round=round, client_steps=tuple(steps.values()), memory=memory,
        own_y=None if own_y is None else lambda memory: own_y(memory.own),
        settings={**algorithm.settings, "momenta": theta},
    )  # fmt: skip


def _other(verb: Verb, steps: dict[ClientStep, ClientStep]) -> Verb:
    """Return the verb with other client steps."""
    return lambda client_step, *rest: verb(steps[client_step], *rest)


def _smoothed(client_step: ClientStep, theta: float) -> ClientStep:
    """Return the client step with momenta in place of the channels of its message."""
    name = client_step.__name__

    @functools.wraps(client_step)
    def smoothed(payload: PyTree, client: Client) -> WithMemory:
        kept: Momenta = client.memory
        reply = client_step(payload, client._replace(memory=kept.own))
        message, old = message_of(reply), kept.momenta[name]
        _require_channels(message, old)
        weight = jnp.where(kept.begun[name] > 0, theta, 1.0)
        now = Point(*(_moved(m, z, weight) for m, z in zip(old, point_of(message), strict=True)))
        after = Momenta(
            {**kept.momenta, name: Point(*map(_known, old, now))},
            {**kept.begun, name: jnp.ones_like(kept.begun[name])},
            reply.memory if isinstance(reply, WithMemory) else kept.own,
        )
        return WithMemory(_with_point(message, now), after)

    return smoothed


def _moved(m: PyTree, z: PyTree, weight: jax.Array) -> PyTree:
    """Return (1 - weight) m + weight z; None for a channel that is not sent."""
    return None if z is None else trees.add_scaled(trees.scale(1 - weight, m), weight, z)


def _known(old: PyTree, new: PyTree) -> PyTree:
    return old if new is None else new


def _require_channels(message: PyTree, old: Point[PyTree]) -> None:
    """Raise unless a message has one `Point`, whose parts are shaped like x, y and y."""
    parts = message if type(message) is tuple else (message,)
    pairs = zip(point_of(message), old, strict=True)
    alike = all(z is None or jax.tree.structure(z) == jax.tree.structure(m) for z, m in pairs)
    if sum(isinstance(part, Point) for part in parts) != 1 or not alike:
        raise UserError(
            "Momenta need messages with one Point(x=..., y=..., v=...), of parts shaped like x and "
            "y, which this method does not send."
        )


def _with_point(message: PyTree, point: Point[PyTree]) -> PyTree:
    """Return a message with another `Point` in it."""
    if isinstance(message, Point):
        return point
    first = next(k for k, part in enumerate(message) if isinstance(part, Point))
    return (*message[:first], point, *message[first + 1 :])
