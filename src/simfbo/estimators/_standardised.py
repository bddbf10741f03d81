"""Rows that are standardised where they are: an algorithm that measures their units first.

The clients of a deployment hold rows in the users' units. Before the first round, two exchanges add
up their counts and sums, and the squared distances from the mean. Single precision is not enough
for the difference of a number and a mean that is much larger, so both are pairs of numbers, the
second of which is what the first leaves out. From then on every payload carries the units as a
fourth part, and a client step sees standardised rows. The units are a part of the state, so a
resumed run has them. They belong to no channel, so codecs leave them as they are.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.federation import Client, ClientStep, Federation, Verb, View
from simfbo.core.method import Method, WrappedStep, Wrapper, client_step, marked
from simfbo.core.problem import Point, PyTree, average
from simfbo.core.sampling import Cohort
from simfbo.core.trees import on_device
from simfbo.errors import TooFewReplies
from simfbo.estimators._scaling import units_of


class Measured(NamedTuple):
    """What the clients' rows have in common.

    Attributes:
        mean: of every column, as `pairs` returns it.
        deviation: of every column.
        rows: how many there are; 0 before they are counted.
    """

    mean: Any
    deviation: Any
    rows: Any


class Standardised(NamedTuple):
    """The state of an algorithm on standardised rows."""

    base: PyTree
    units: Measured


class OnScaled(WrappedStep):
    """A client step on standardised rows, whose payload has the units as its last part."""

    def __call__(self, payload: PyTree, client: Client) -> PyTree:
        """Run the step."""
        *at, units = payload
        lower, upper = (
            replace(part, samples=scaled(part.samples, Measured(*units)))
            for part in (client.data.lower, client.data.upper)
        )
        data = client.data._replace(lower=lower, upper=upper)
        return self.step(Point(*at), client._replace(data=data))


class Totals(eqx.Module):
    """The client steps that measure the columns."""

    @client_step
    def totals(self, payload: PyTree, client: Client) -> PyTree:
        """Return a client's number of rows, and the sums of its columns."""
        count, total = _sums(client)
        return count, total(0.0, 1)

    @client_step
    def centred_totals(self, centre: jax.Array, client: Client) -> PyTree:
        """Return the sums of a client's columns less the centre, and of the squares of that."""
        _, total = _sums(client)
        return total(centre, 1), total(centre, 2)


class OnStandardised(Wrapper):
    """A method whose payloads are (x, y, v), on standardised rows.

    Attributes:
        columns: of the samples that the clients hold: (pairs of columns, and any other arrays).
    """

    columns: int = eqx.field(static=True)

    def inner_state(self, state: Standardised) -> PyTree:
        """Return the method's own state."""
        return state.base

    def init(self, x: PyTree, y: PyTree) -> Standardised:
        """Return the initial state: nothing is measured."""
        zeros = (np.zeros(shape, np.float32) for shape in ((2, self.columns), self.columns, ()))
        return Standardised(self.inner.init(x, y), Measured(*on_device(tuple(zeros))))

    def with_inner_state(self, state: Standardised, inner: PyTree) -> Standardised:
        """Return a state with another one of the method."""
        return state._replace(base=inner)

    def view(self, state: Standardised, federation: Federation) -> Federation:
        """Return the federation with the units in every payload."""

        def with_units(verb: Verb) -> Verb:
            def ask(step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array) -> PyTree:
                return verb(OnScaled(step), (*payload, tuple(state.units)), cohort, key)

            return ask

        return View(federation, with_units(federation.sum), with_units(federation.gather))

    def prepare(self, state: Standardised, federation: Federation, key: jax.Array) -> Standardised:
        """Measure the units, then prepare the method."""
        return super().prepare(_measured(state, federation, key), federation, key)

    @property
    def client_steps(self) -> dict[str, ClientStep]:
        """Return the steps that measure, and the method's own on standardised rows."""
        inner = self.inner.client_steps.items()
        return {**marked(Totals()), **{name: OnScaled(step) for name, step in inner}}

    def evaluation_point(self, state: Standardised) -> Point[PyTree]:
        """Return x with the units, and y."""
        x, y, _ = self.point(state)
        return Point(x=(x, tuple(state.units)), y=y)


def standardised(algorithm: Method, columns: int) -> Method:
    """Let an algorithm whose payloads are (x, y, v) see standardised rows.

    Args:
        algorithm: of a problem whose samples are as `scaled` returns them.
        columns: of the samples that the clients hold: (pairs of columns, and any other arrays).
    """
    return OnStandardised(algorithm, columns)


def scaled(samples: PyTree, units: Measured) -> PyTree:
    """Return (columns, ...) with standardised columns, and the number of all rows as the last."""
    columns, *rest = samples
    count = jnp.broadcast_to(units.rows, len(columns))
    return (columns - units.mean).sum(1) / units.deviation, *rest, count


def pairs(numbers: np.ndarray) -> np.ndarray:
    """Return each number of [..., d] as two in single precision, [..., 2, d], whose sum it is."""
    first = numbers.astype(np.float32)
    return np.stack([first, (numbers - first).astype(np.float32)], -2)


def _sums(client: Client) -> tuple[jax.Array, Callable[[Any, int], jax.Array]]:
    """Return a client's number of rows, and (centre, power) -> sums of powers of its columns."""
    data = client.data
    batch, count = data.lower.full(data.client), data.lower.size(data.client).astype(float)

    def total(centre: Any, power: int) -> jax.Array:
        def mean(rows: PyTree) -> jax.Array:
            return ((rows[0].astype(float).sum(1) - centre) ** power).mean(0)

        return count * average(mean, batch)

    return count, total


def _measured(state: Standardised, federation: Federation, key: jax.Array) -> Standardised:
    """Measure the units."""
    everyone = Cohort(np.arange(federation.n, dtype=np.int32), np.ones(federation.n))
    with jax.enable_x64(True):
        found = federation.sum(Totals().totals, (), everyone, key)
        _require_all(federation)
        count, first = (np.asarray(part, float) for part in found)
        found = federation.sum(Totals().centred_totals, first / count, everyone, key)
        _require_all(federation)
        shift, square = (np.asarray(part, float) / count for part in found)
    mean, deviation = units_of(first / count, shift, square, float(count))
    parts = pairs(mean), np.asarray(deviation, np.float32), np.asarray(count, np.float32)
    return state._replace(units=Measured(*on_device(parts)))


def _require_all(federation: Federation) -> None:
    """Raise unless every client's reply counted: the units would be those of others."""
    exchange = federation.latest
    if exchange is not None and not np.all(exchange.admitted):
        raise TooFewReplies(int(np.sum(exchange.admitted)), exchange)
