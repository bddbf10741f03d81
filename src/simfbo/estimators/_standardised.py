"""Standardisation on the clients: a wrapper of methods that measures the units of rows first.

The clients of a deployment have rows in the users' units. Before the first round, two exchanges add
up their counts and sums, and the squared distances from the mean. Since single precision is
insufficient for the difference between a number and a much larger mean, both are pairs of single
precision numbers, a value and its rounding error. All payloads then have the units as a fourth
part, and client steps receive standardised rows. The units are part of the state, and therefore of
checkpoints. They belong to no channel, so that codecs do not change them.
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
    """The units of all clients' rows.

    Attributes:
        mean: of every column, in the form of `pairs`.
        deviation: of every column.
        rows: their number; 0 before the measurement.
    """

    mean: Any
    deviation: Any
    rows: Any


class Standardised(NamedTuple):
    """The state of an algorithm on standardised rows."""

    base: PyTree
    units: Measured


class OnScaled(WrappedStep):
    """A client step on standardised rows; its payload has the units as the last part."""

    def __call__(self, payload: PyTree, client: Client) -> PyTree:
        """Run the step."""
        *at, units = payload
        lower, upper = (
            replace(level, samples=scaled(level.samples, Measured(*units)))
            for level in (client.data.lower, client.data.upper)
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
        """Return the sums of a client's columns minus the centre, and of their squares."""
        _, total = _sums(client)
        return total(centre, 1), total(centre, 2)


class OnStandardised(Wrapper):
    """A method with payloads (x, y, v) on standardised rows.

    Attributes:
        columns: the number of columns in the clients' samples (pairs of columns, ...).
    """

    columns: int = eqx.field(static=True)

    def inner_state(self, state: Standardised) -> PyTree:
        """Return the state of the wrapped method."""
        return state.base

    def init(self, x: PyTree, y: PyTree) -> Standardised:
        """Return the initial state, before the measurement."""
        zeros = (np.zeros(shape, np.float32) for shape in ((2, self.columns), self.columns, ()))
        return Standardised(self.inner.init(x, y), Measured(*on_device(tuple(zeros))))

    def with_inner_state(self, state: Standardised, inner: PyTree) -> Standardised:
        """Replace the state of the wrapped method."""
        return state._replace(base=inner)

    def view(self, state: Standardised, federation: Federation) -> Federation:
        """Return a view of the federation that adds the units to every payload."""

        def with_units(verb: Verb) -> Verb:
            def call(step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array) -> PyTree:
                return verb(OnScaled(step), (*payload, tuple(state.units)), cohort, key)

            return call

        return View(federation, with_units(federation.sum), with_units(federation.gather))

    def prepare(self, state: Standardised, federation: Federation, key: jax.Array) -> Standardised:
        """Measure the units, then prepare the method."""
        return super().prepare(_measured(state, federation, key), federation, key)

    @property
    def client_steps(self) -> dict[str, ClientStep]:
        """The steps of the measurement, and those of the wrapped method on standardised rows."""
        inner = self.inner.client_steps.items()
        return {**marked(Totals()), **{name: OnScaled(step) for name, step in inner}}

    def evaluation_point(self, state: Standardised) -> Point[PyTree]:
        """Return x with the units, and y."""
        x, y, _ = self.point(state)
        return Point(x=(x, tuple(state.units)), y=y)


def standardised(algorithm: Method, columns: int) -> Method:
    """Wrap an algorithm with payloads (x, y, v) to run on standardised rows.

    Args:
        algorithm: of a problem with samples in the form of `scaled`.
        columns: the number of columns in the clients' samples (pairs of columns, ...).
    """
    return OnStandardised(algorithm, columns)


def scaled(samples: PyTree, units: Measured) -> PyTree:
    """Standardise the columns of samples (columns, ...), and append the total number of rows."""
    columns, *rest = samples
    count = jnp.broadcast_to(units.rows, len(columns))
    return (columns - units.mean).sum(1) / units.deviation, *rest, count


def pairs(numbers: np.ndarray) -> np.ndarray:
    """Split numbers [..., d] into sums of two single precision numbers, [..., 2, d]."""
    rounded = numbers.astype(np.float32)
    return np.stack([rounded, (numbers - rounded).astype(np.float32)], -2)


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
    """Measure the units in two exchanges with all clients."""
    cohort = Cohort(np.arange(federation.n, dtype=np.int32), np.ones(federation.n))
    with jax.enable_x64(True):
        totals = federation.sum(Totals().totals, (), cohort, key)
        _require_all(federation)
        count, total = (np.asarray(number, float) for number in totals)
        moments = federation.sum(Totals().centred_totals, total / count, cohort, key)
        _require_all(federation)
        shift, square = (np.asarray(moment, float) / count for moment in moments)
    mean, deviation = units_of(total / count, shift, square, float(count))
    units = pairs(mean), np.asarray(deviation, np.float32), np.asarray(count, np.float32)
    return state._replace(units=Measured(*on_device(units)))


def _require_all(federation: Federation) -> None:
    """Raise if a reply was rejected, since the units would be wrong."""
    exchange = federation.latest
    if exchange is not None and not np.all(exchange.admitted):
        raise TooFewReplies(int(np.sum(exchange.admitted)), exchange)
