"""A federation seen through another verb: the same clients and books, other messages."""

from collections.abc import Callable
from typing import Any, final

import jax
import numpy as np

from simfbo.core.federation import ClientWork, Exchange, Federation, Ledger
from simfbo.core.gate import Refusal
from simfbo.core.problem import PyTree
from simfbo.core.sampling import Cohort

Verb = Callable[[ClientWork, PyTree, Cohort, jax.Array], Any]


@final
class View:
    """A federation whose `aggregate` is another function; everything else is the federation's."""

    def __init__(self, federation: Federation, aggregate: Verb) -> None:
        """Take the federation and the verb, which usually calls the federation's own."""
        self._federation, self._aggregate = federation, aggregate
        self.ledger: Ledger = federation.ledger
        self.refusals: list[Refusal] = federation.refusals
        self.secret = federation.secret

    @property
    def n(self) -> int:
        """Return the number of clients there are."""
        return self._federation.n

    @property
    def p(self) -> np.ndarray:
        """Return the clients' weights p_i."""
        return self._federation.p

    @property
    def latest(self) -> Exchange | None:
        """Return what came of the last exchange."""
        return self._federation.latest

    def cohort(self, key: jax.Array) -> Cohort:
        """Return the clients that take part."""
        return self._federation.cohort(key)

    def mean_norm(self, key: jax.Array) -> float | None:
        """Return rho where it is known."""
        return self._federation.mean_norm(key)

    def aggregate(self, work: ClientWork, payload: PyTree, cohort: Cohort, key: jax.Array) -> Any:
        """Return what the verb gives."""
        return self._aggregate(work, payload, cohort, key)
