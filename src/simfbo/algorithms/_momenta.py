"""Client momenta, for robust aggregation: Karimireddy, He, Jaggi, "Learning from History for
Byzantine Robust Optimization", ICML 2021; for bilevel problems BR-FedBiM, ICLR 2026.

A lower variance of honest messages between rounds limits the effect of malicious ones.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from simfbo.core import Client, Federation, Method, Point, View, WithMemory, Wrapper, trees
from simfbo.core.federation import ClientStep, Verb, message_of
from simfbo.core.method import WrappedStep, require_unmodified_sums
from simfbo.core.problem import PyTree, point_of
from simfbo.errors import UserError


class Momenta(NamedTuple):
    """A client's memory: a momentum per client step and channel, and the inner method's memory."""

    momenta: dict[str, Point[PyTree]]
    begun: dict[str, PyTree]
    own: PyTree


class Smoothed(WrappedStep):
    """A client step with momenta in place of the channels of its message."""

    theta: float

    def __call__(self, payload: PyTree, client: Client) -> WithMemory:
        memory, name = client.memory, self.__name__
        reply = self.step(payload, client._replace(memory=memory.own))
        message, old = message_of(reply), memory.momenta[name]
        _require_channels(message, old)
        weight = jnp.where(memory.begun[name] > 0, self.theta, 1.0)

        def mixed(m: PyTree, z: PyTree) -> PyTree:
            return None if z is None else trees.add_scaled(trees.scale(1 - weight, m), weight, z)

        sent = Point(*map(mixed, old, point_of(message)))
        kept = Point(*(m if new is None else new for m, new in zip(old, sent, strict=True)))
        after = Momenta(
            {**memory.momenta, name: kept},
            {**memory.begun, name: jnp.ones_like(memory.begun[name])},
            reply.memory if isinstance(reply, WithMemory) else memory.own,
        )
        if isinstance(message, Point):
            return WithMemory(sent, after)
        return WithMemory(tuple(sent if isinstance(z, Point) else z for z in message), after)


def _require_channels(message: PyTree, old: Point[PyTree]) -> None:
    """Raise unless a message has one `Point` with parts of the structure of x, y and y."""
    parts = message if type(message) is tuple else (message,)
    pairs = zip(point_of(message), old, strict=True)
    alike = all(z is None or jax.tree.structure(z) == jax.tree.structure(m) for z, m in pairs)
    if sum(isinstance(part, Point) for part in parts) != 1 or not alike:
        raise UserError(
            "Momenta need messages with one Point(x=..., y=..., v=...), of parts shaped like x and "
            "y, which this method does not send."
        )


class WithMomenta(Wrapper):
    """A method whose clients send momenta; see `with_momenta`."""

    has_memory = True

    theta: float = 0.1

    def __check_init__(self) -> None:
        if not 0 < self.theta <= 1:
            raise UserError(f"theta must lie above 0 and be at most 1, got {self.theta}.")
        if self.theta < 1:
            require_unmodified_sums(self.inner, "a moving average")

    def view(self, state: PyTree, federation: Federation) -> Federation:
        return View(federation, self._smoothed(federation.sum), self._smoothed(federation.gather))

    def _smoothed(self, verb: Verb) -> Verb:
        return lambda step, *rest: verb(Smoothed(step, self.theta), *rest)

    @property
    def client_steps(self) -> dict[str, ClientStep]:
        return {name: Smoothed(step, self.theta) for name, step in self.inner.client_steps.items()}

    def client_memory(self, x: PyTree, y: PyTree) -> Momenta:
        names, own = self.inner.client_steps, self.inner.client_memory(x, y)
        x, y = trees.host_zeros(trees.on_device((x, y)))
        begun = trees.host_zeros(jnp.zeros(()))
        return Momenta(dict.fromkeys(names, Point(x, y, y)), dict.fromkeys(names, begun), own)

    def client_y(self, memory: Momenta) -> PyTree:
        return self.inner.client_y(memory.own)


def with_momenta(algorithm: Method, theta: float = 0.1) -> Method:
    """Wrap an algorithm so that its clients send momenta in place of messages.

        m_i = (1 - theta) m_i + theta z_i,     initially m_i = z_i

    by channel, stored in the client's memory. Other parts of a message, such as ShroFBO's
    ||a_i||_1, are unchanged.

    Args:
        algorithm: a method with channels in its messages.
        theta: the weight of the new message, above 0; without effect for 1.

    Returns:
        The method, with the same name.

    Example:
        >>> from simfbo.algorithms import simfbo
        >>> from simfbo.tasks import quadratic
        >>> method = simfbo(quadratic().problem, Point(x=0.05, y=0.2, v=0.1))
        >>> with_momenta(method, 0.1).name
        'SimFBO'
    """
    return WithMomenta(algorithm, theta)
