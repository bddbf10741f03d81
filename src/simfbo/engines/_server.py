"""What the server draws in a round: who takes part, how much each does, and who drops out.

What declares that it is the same in every round is drawn once. The rest is drawn on the host, from
the keys that a trace of a round has shown; it must have declared that it depends on these alone.
"""

from typing import Any, NamedTuple, Self

import jax
import numpy as np

from simfbo.core.gate import limit_of
from simfbo.core.keys import is_constant, is_keyed
from simfbo.core.local_work import LocalDraw, LocalPlan, RuleTable
from simfbo.core.sampling import Cohort
from simfbo.engines.simulated import SimulatedFederation, number_of


class Fixed(NamedTuple):
    """What is the same in every round, as inputs of a program; None for what is drawn.

    Attributes:
        weights: of the cohort.
        work: the local work of all clients or, where it is equal, of each.
        rules: the table of local rules.
        rho: the mean of ||a_i||_1, where the server knows it.
        ids: the clients' numbers, where these are not their places.
        limit: the gate's.
        start: x0 and y0, for codecs that are relative to them.
    """

    weights: Any
    work: Any
    rules: RuleTable
    rho: Any
    ids: Any
    limit: Any
    start: Any


class Row(NamedTuple):
    """What was drawn for one exchange; `work` is that of all clients."""

    cohort: Cohort
    work: LocalDraw
    absent: np.ndarray


class Server(NamedTuple):
    """What the server of an engine draws.

    Attributes:
        engine: the engine.
        cohort: that of every round; None if it is drawn.
        work: the local work of all clients in every round; None if it is drawn.
        absent: nobody; None if it is drawn who does not reply.
        example: a cohort, for its size.
    """

    engine: SimulatedFederation
    cohort: Cohort | None
    work: LocalDraw | None
    absent: np.ndarray | None
    example: Cohort

    @classmethod
    def of(cls, engine: SimulatedFederation) -> Self | None:
        """Return what the server draws; None where that may depend on when it is asked."""
        draws, absence = engine.local_work.draws, engine.absence
        if not all(map(is_keyed, (engine.sampler, *draws))):
            return None
        if absence is not None and not is_keyed(absence):
            return None
        key = jax.random.key(0)
        example = engine.cohort(key)
        cohort = example if is_constant(engine.sampler) else None
        work = engine.local_work.drawn(key, engine.n) if all(map(is_constant, draws)) else None
        absent = np.zeros(len(example.ids), bool) if absence is None else None
        return cls(engine, cohort, work, absent, example)

    def key(self, words: np.ndarray) -> Any:
        """Return a key as those who draw take it: our own are as content with its data."""
        engine = self.engine
        drawn_by = (engine.sampler, *engine.local_work.draws, engine.absence)
        ours = all(one is None or one.__module__.startswith("simfbo.core") for one in drawn_by)
        return words if ours else jax.random.wrap_key_data(jax.numpy.asarray(words))

    @property
    def draws(self) -> bool:
        """Return whether anything is drawn anew in every round."""
        return self.cohort is None or self.work is None or self.absent is None

    @property
    def fixed(self) -> Fixed:
        """Return what is the same in every round, as inputs of a program."""
        engine, work = self.engine, self.work
        ids = engine.data.ids
        if work is not None and all((part == part[0]).all() for part in work):
            work = work.of(0)
        known = self.work is not None and engine.local_work.assigned
        return Fixed(
            weights=None if self.cohort is None else np.asarray(self.cohort.weights),
            work=work,
            rules=engine.local_work.table,
            rho=np.asarray(engine.mean_norm(jax.random.key(0))) if known else None,
            ids=None if np.array_equal(ids, np.arange(len(ids))) else ids,
            limit=number_of(limit_of(engine.gate)),
            start=None if engine.codecs is None else engine.start,
        )

    @property
    def masked(self) -> bool:
        """Return whether who counts must be found out client by client.

        Otherwise everybody replies, and the gate refuses only what is not finite: a message of that
        kind shows in the sum of squares, and makes a round unusual.
        """
        rules = self.engine.gate
        few = rules.min_replies > len(self.example.ids)
        return self.absent is None or rules.max_norm is not None or rules.open or few

    @property
    def form(self) -> Any:
        """Return what programs depend on besides the shapes of `fixed`."""
        engine = self.engine
        ids = None if self.cohort is None else self.cohort.ids.tobytes()
        rules = engine.gate.min_replies, engine.aggregators, engine.codecs, engine.detect_anomalies
        how = engine.strategy, engine.chunk, engine.mesh, engine.n, len(self.example.ids)
        drawn = self.absent is None, self.masked
        return ids, engine.local_work.assigned, rules, how, drawn

    def plan(self, work: LocalDraw) -> LocalPlan:
        """Return the plan for what was drawn."""
        return self.engine.local_work.table.plan(work)

    def draw_cohort(self, key: Any) -> Cohort:
        """Return the cohort for a key."""
        return self.engine.cohort(key) if self.cohort is None else self.cohort

    def draw_row(self, key: Any, cohort: Cohort) -> Row:
        """Return what an exchange with a cohort needs."""
        engine = self.engine
        work = engine.local_work.drawn(key, engine.n) if self.work is None else self.work
        absent = engine.absent(key, cohort.ids) if self.absent is None else self.absent
        return Row(cohort, work, absent)

    def draw_rho(self, key: Any) -> np.ndarray:
        """Return rho for a key."""
        return np.asarray(self.engine.mean_norm(key))
