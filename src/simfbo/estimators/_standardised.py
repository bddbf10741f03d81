"""Rows that are standardised where they are: an algorithm that measures their units first.

The clients of a deployment hold rows in the users' units. Before the first round, two exchanges add
up their counts and sums, and the squared distances from the mean. Single precision is not enough
for the difference of a number and a mean that is much larger, so both are pairs of numbers, the
second of which is what the first leaves out. From then on every payload carries the units as a
fourth part, and a client step sees standardised rows. The units are a part of the state, so a
resumed run has them. They belong to no channel, so codecs leave them as they are.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.federation import (
    Algorithm,
    Client,
    ClientStep,
    Federation,
    Hosted,
    Tracing,
    Verb,
    View,
)
from simfbo.core.problem import Point, PyTree, average
from simfbo.core.sampling import Cohort
from simfbo.core.trees import on_device
from simfbo.errors import TooFewReplies
from simfbo.estimators._scaling import units_of

Part = Callable[[PyTree, Federation, jax.Array], PyTree]


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

    @property
    def x(self) -> PyTree:
        """Return x."""
        return self.base.x

    @property
    def y(self) -> PyTree:
        """Return y."""
        return self.base.y

    @property
    def v(self) -> PyTree:
        """Return v."""
        return self.base.v

    @property
    def projected(self) -> jax.Array:
        """Return how often the projection of v acted, where the method has one."""
        return self.base.projected


def standardised(algorithm: Algorithm, columns: int) -> Algorithm:
    """Let an algorithm whose payloads are (x, y, v) see standardised rows.

    Args:
        algorithm: of a problem whose samples are as `scaled` returns them.
        columns: of the samples that the clients hold: (pairs of columns, and any other arrays).
    """
    inner = algorithm.hosted or Hosted(lambda _: sys.maxsize, _same, algorithm.round, _same)

    def init(x: PyTree, y: PyTree) -> Standardised:
        zeros = (np.zeros(shape, np.float32) for shape in ((2, columns), columns, ()))
        return Standardised(algorithm.init(x, y), Measured(*on_device(tuple(zeros))))

    def inside(part: Part) -> Part:
        def run(state: Standardised, federation: Federation, key: jax.Array) -> Standardised:
            view = _view(federation, state.units)
            return state._replace(base=part(state.base, view, key))

        return run

    def prepare(state: Standardised, federation: Federation, key: jax.Array) -> Standardised:
        return inside(inner.prepare)(_measured(state, federation, key), federation, key)

    def round(state: Standardised, federation: Federation, key: jax.Array) -> Standardised:
        return inside(algorithm.round)(_measured(state, federation, key), federation, key)

    hosted = Hosted(
        lambda state: inner.ahead(state.base), prepare, inside(inner.round), inside(inner.finish)
    )
    steps = (totals, centred_totals, *map(_on_scaled, algorithm.client_steps))
    tracing = Tracing(round, hosted=hosted)
    evidence = algorithm.evidence
    return algorithm._replace(
        init=init, round=round, client_steps=steps, tracing=tracing, judged=_judged,
        evidence=None if evidence is None else lambda state: evidence(state.base),
    )  # fmt: skip


def scaled(samples: PyTree, units: Measured) -> PyTree:
    """Return (columns, ...) with standardised columns, and the number of all rows as the last."""
    columns, *rest = samples
    count = jnp.broadcast_to(units.rows, len(columns))
    return (columns - units.mean).sum(1) / units.deviation, *rest, count


def pairs(numbers: np.ndarray) -> np.ndarray:
    """Return each number of [..., d] as two in single precision, [..., 2, d], whose sum it is."""
    first = numbers.astype(np.float32)
    return np.stack([first, (numbers - first).astype(np.float32)], -2)


def totals(payload: PyTree, client: Client) -> PyTree:
    """Return a client's number of rows, and the sums of its columns."""
    count, total = _sums(client)
    return count, total(0.0, 1)


def centred_totals(centre: jax.Array, client: Client) -> PyTree:
    """Return the sums of a client's columns less the centre, and of the squares of that."""
    _, total = _sums(client)
    return total(centre, 1), total(centre, 2)


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
    """Measure the units, unless they are known."""
    if np.asarray(state.units.rows):
        return state
    everyone = Cohort(np.arange(federation.n, dtype=np.int32), np.ones(federation.n))
    with jax.enable_x64(True):
        found = federation.sum(totals, (), everyone, key)
        _require_all(federation)
        count, first = (np.asarray(part, float) for part in found)
        found = federation.sum(centred_totals, first / count, everyone, key)
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


def _view(federation: Federation, units: Measured) -> View:
    """Return the federation with standardised rows."""

    def with_units(verb: Verb) -> Verb:
        def ask(
            client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array, eta: Any
        ) -> PyTree:
            return verb(_on_scaled(client_step), (*payload, tuple(units)), cohort, key, eta)

        return ask

    return View(federation, with_units(federation.sum), with_units(federation.gather))


@lru_cache(maxsize=128)
def _on_scaled(client_step: ClientStep) -> ClientStep:
    """Return a client step on standardised rows; always the same, so that it is compiled once."""

    @wraps(client_step)
    def step(payload: PyTree, client: Client) -> PyTree:
        *at, units = payload
        lower, upper = (
            replace(part, samples=scaled(part.samples, Measured(*units)))
            for part in (client.data.lower, client.data.upper)
        )
        data = client.data._replace(lower=lower, upper=upper)
        return client_step(Point(*at), client._replace(data=data))

    return step


def _judged(state: Standardised) -> Point[PyTree]:
    """Return what clients need to measure a state: x with the units, and y."""
    return Point(x=(state.x, tuple(state.units)), y=state.y)


def _same(state: PyTree, federation: Federation, key: jax.Array) -> PyTree:
    return state
