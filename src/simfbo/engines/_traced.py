"""The verb inside a trace.

`Listener` follows one round without computing anything and writes its script (`_script`): which
exchanges it has, and which keys the server draws from. `Traced` computes them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from simfbo.codecs.messages import code_payload, down_key, start_of
from simfbo.core import memory, trees
from simfbo.core.exchange import Refusal
from simfbo.core.federation import ClientStep, Federation
from simfbo.core.gate import occurrences
from simfbo.core.ledger import Ledger
from simfbo.core.local_work import LocalDraw
from simfbo.core.method import Method, Parts, as_module
from simfbo.core.problem import PyTree
from simfbo.core.sampling import Cohort
from simfbo.engines import _batches
from simfbo.engines._cohort import Found, Inputs, Sender
from simfbo.engines._script import Event, OneExchange, Script
from simfbo.engines._server import Fixed, Server
from simfbo.engines.base import Call
from simfbo.robust import aggregation, anomalies

Round = Callable[[PyTree, Federation, jax.Array], PyTree]


def traced_round(method: Method) -> Round:
    """Return the part of a method's round that can be traced."""
    return method.round if method.hosted is None else method.hosted.round


class NeedsHost(Exception):
    """A round cannot be traced; the argument says why."""


class Noted(NamedTuple):
    """What is to be known of an exchange; see `simfbo.engines._cohort.Found`.

    Coded messages have their bytes in `octets`, and a client's payload has `down`.
    """

    squares: Any
    passed: Any
    probes: Any
    octets: Any = None
    down: Any = None


class _Common:
    """What both federations inside a trace have."""

    def __init__(self, server: Server, fixed: Fixed) -> None:
        self.server, self.fixed, self.engine = server, fixed, server.engine
        self.secret = False
        self.latest: Any = None
        self.ids: list[Any] = []  # of the cohorts so far

    @property
    def n(self) -> int:
        """Return the number of clients."""
        return self.engine.n

    @property
    def p(self) -> np.ndarray:
        """Refuse: the weights are no constants of a program."""
        raise NeedsHost("it reads federation.p")

    @property
    def ledger(self) -> Ledger:
        """Refuse: it is counted after the rounds."""
        raise NeedsHost("it reads federation.ledger")

    @property
    def refusals(self) -> list[Refusal]:
        """Refuse: they are known after the rounds."""
        raise NeedsHost("it reads federation.refusals")

    def index(self, cohort: Cohort) -> int:
        """Return which of the cohorts so far this is."""
        for c, ids in enumerate(self.ids):
            if cohort.ids is ids:
                return c
        raise NeedsHost("it asks a cohort that federation.cohort did not return")


class _Factor(NamedTuple):
    """What an algorithm may ask of the latest exchange inside a trace."""

    factor: Any


class Listener(_Common):
    """Follows a round and writes down what happens."""

    def __init__(self, server: Server, fixed: Fixed, dummy: jax.Array) -> None:
        """Take the server's draws, and a number that everything depends on that is sent."""
        super().__init__(server, fixed)
        self._dummy = dummy
        self.events: list[Event] = []
        self.keys: list[jax.Array] = []
        self.exchanges: list[OneExchange] = []

    def _draw(self, key: jax.Array, event: Event) -> None:
        self.events.append(event)
        self.keys.append(key)

    def cohort(self, key: jax.Array) -> Cohort:
        """Return a cohort of the right size."""
        self._draw(key, Event("cohort"))
        example = self.server.example
        if self.server.cohort is not None:
            self.ids.append(example.ids)
            return Cohort(example.ids, self.fixed.weights)
        ids: Any = jnp.asarray(example.ids) + self._dummy.astype(jnp.int32)
        weights: Any = jnp.asarray(example.weights) + self._dummy
        self.ids.append(ids)
        return Cohort(ids, weights)

    def mean_norm(self, key: jax.Array) -> Any:
        """Return rho where it is known."""
        if not self.engine.local_work.assigned:
            return None
        if self.server.work is None:
            self._draw(key, Event("rho"))
            return self._dummy
        return self.fixed.rho

    def sum(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Return zeros of the sum's shape."""
        return self._zeros(client_step, payload, cohort, key, False)

    def gather(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Return zeros of the stack's shape."""
        return self._zeros(client_step, payload, cohort, key, True)

    def _zeros(
        self,
        client_step: ClientStep,
        payload: PyTree,
        cohort: Cohort,
        key: jax.Array,
        single: bool,
    ) -> PyTree:
        self._draw(key, Event("exchange", self.index(cohort)))
        server, engine, size = self.server, self.engine, len(self.server.example.ids)
        plan = server.plan(LocalDraw(np.ones(size, np.int32), np.zeros(size, np.int32)))
        step = as_module(client_step)
        call = Call(step, Parts.of(step), payload, server.example, plan, key, single)
        like, layout = engine.like(call), engine.layout(call, server.cohort is not None)
        if layout is None:
            raise NeedsHost("its clients run in lanes")
        down = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), payload)
        stacked = engine.stacks(call, like)
        codecs = engine.codecs_of(client_step)
        self.exchanges.append(
            OneExchange(client_step.__name__, down, like, size, stacked, layout, codecs)
        )
        self.latest = _Factor(1.0 + self._dummy)
        first = (size,) if single else ()
        return jax.tree.map(
            lambda a: jnp.zeros(first + a.shape, a.dtype) + self._dummy.astype(a.dtype), like
        )


def listen(method: Parts, server: Server, fixed: Fixed, state: PyTree, length: int) -> Script:
    """Follow one round and return its script.

    Args:
        method: whose round, in parts.
        server: what the server draws.
        fixed: what of it is the same in every round.
        state: of the method, for its shapes.
        length: of how many rounds keys are wanted at a time.
    """
    heard: list[Listener] = []

    def keys(state: PyTree, numbers: Any, fixed: Fixed, dummy: jax.Array, key: jax.Array) -> Any:
        heard.append(Listener(server, fixed, dummy))
        traced_round(method._replace(numbers=numbers).joined())(state, heard[-1], key)
        return [jax.random.key_data(one) for one in heard[-1].keys]

    others = state, method.numbers, fixed, np.zeros((), jnp.result_type(float))
    root = jax.random.key(0)
    closed = jax.make_jaxpr(keys)(*others, root)
    listener = heard[-1]
    if not server.draws:
        return Script(tuple(listener.exchanges), (), None)
    if _depends_on_more_than_the_last(closed.jaxpr):
        raise NeedsHost("its random keys depend on the state")

    def all_keys(root: jax.Array, first: jax.Array) -> list[jax.Array]:
        inputs: list[Any] = [value.aval for value in closed.jaxpr.invars[:-1]]
        unused = [jnp.zeros(value.shape, value.dtype) for value in inputs]

        def of_round(t: jax.Array) -> list[jax.Array]:
            return jaxpr_as_fun(closed)(*unused, jax.random.fold_in(root, t))

        return jax.vmap(of_round)(first + jnp.arange(length, dtype=jnp.int32))

    program = jax.jit(all_keys).lower(root, np.int32(1)).compile()
    return Script(tuple(listener.exchanges), tuple(listener.events), program)


def _depends_on_more_than_the_last(jaxpr: Any) -> bool:
    """Return whether the outputs of a trace depend on inputs other than the last."""
    tainted = set(jaxpr.invars[:-1])
    for eqn in jaxpr.eqns:
        if any(var in tainted for var in eqn.invars if not hasattr(var, "val")):
            tainted.update(eqn.outvars)
    return any(var in tainted for var in jaxpr.outvars if not hasattr(var, "val"))


class Traced(_Common):
    """Computes the exchanges of one round."""

    def __init__(
        self,
        server: Server,
        fixed: Fixed,
        script: Script,
        data: list[Any],
        row: list[Any],
        number: Any,
        looks: jax.Array | None,
        client_memory: PyTree,
    ) -> None:
        """Take the server, the script, and what the round needs.

        Args:
            server: what the server draws.
            fixed: what of it is the same in every round.
            script: what happens in every round.
            data: the clients' data, by exchange.
            row: what was drawn for this round, by event.
            number: of its first exchange.
            looks: which exchanges are looked at; None for none.
            client_memory: what the clients remember; `self.client_memory` is what they do after the
                exchanges so far.
        """
        super().__init__(server, fixed)
        self._script, self._data, self._number, self._looks = script, data, number, looks
        self._drawn = iter(row) if script.events else None
        self.notes: list[Noted] = []
        self.usual: Any = jnp.ones((), bool)
        self.client_memory = client_memory

    def _next(self) -> Any:
        return None if self._drawn is None else next(self._drawn)

    def cohort(self, key: jax.Array) -> Cohort:
        """Return the cohort that was drawn."""
        drawn = self._next()
        if self.server.cohort is not None:
            drawn = Cohort(self.server.cohort.ids, self.fixed.weights)
        self.ids.append(drawn.ids)
        return drawn

    def mean_norm(self, key: jax.Array) -> Any:
        """Return rho where it is known."""
        if not self.engine.local_work.assigned:
            return None
        return self._next() if self.server.work is None else self.fixed.rho

    def sum(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Return sum over the cohort of w_i client_step(payload, client_i); see `Federation`."""
        found, factor, stacked = self._exchange(client_step, payload, cohort, key)
        if stacked:
            weights: Any = jnp.asarray(cohort.weights, float)
            if found.passed is not None:
                weights = jnp.where(found.passed, factor * weights, 0.0)
            return aggregation.combine(self.engine.aggregators, found.total, weights)
        return _scaled(factor, found.total)

    def gather(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Return the cohort's messages, stacked; see `Federation`."""
        found, factor, _ = self._exchange(client_step, payload, cohort, key)
        return _scaled(factor, found.total)

    def _exchange(
        self,
        client_step: ClientStep,
        payload: PyTree,
        cohort: Cohort,
        key: jax.Array,
    ) -> tuple[Found, Any, bool]:
        """Compute one exchange; return what was found, the factor, and whether it is stacked."""
        e = len(self.notes)
        one, fixed, server = self._script.exchanges[e], self.fixed, self.server
        work, present = self._next() or (None, None)
        if present is None and server.masked:
            present = np.ones(one.size, bool)
        places, weigh = cohort.ids, None
        if one.codecs is not None:
            base = start_of(one.codecs, payload, fixed.start)
            payload, weigh = code_payload(one.codecs, payload, base, down_key(key))
        parts = Parts.of(as_module(client_step))
        inputs = Inputs(
            payload=payload,
            data=self._data[e],
            places=places,
            ids=places if fixed.ids is None else fixed.ids[places],
            repeats=_repeats(places),
            weights=jnp.asarray(cohort.weights),
            plan=fixed.rules.plan(self._work(places) if work is None else work),
            numbers=parts.numbers,
            present=present,
            look=None if self._looks is None else self._looks[e],
            limit=fixed.limit,
            window=self._window(one.size, self._number + e),
            weighed=None,
            key=key,
            memory=memory.rows_of(self.client_memory, places),
        )
        sender = Sender(parts.structure, one.codecs)
        found = _batches.compute(sender, one.like, one.stacked, one.layout, inputs)
        down = None if weigh is None else weigh()
        self.notes.append(Noted(*found[1:4], found.octets, down))
        self.usual &= found.finite
        if self.client_memory is not None:
            given = self.client_memory, found.memory, places, found.passed
            self.client_memory = memory.kept(*given)
        factor = None
        if found.passed is not None:
            admitted = jnp.sum(found.passed.astype(jnp.int32))
            self.usual &= admitted >= max(1, self.engine.gate.min_replies)
            factor = one.size / jnp.maximum(1, admitted).astype(float)
        self.latest = _Factor(1.0 if factor is None else factor)
        return found, factor, one.stacked

    def _window(self, clients: int, number: Any) -> Any:
        """Return the first position whose message is compared; None where none is."""
        return anomalies.window_start(clients, number) if self.engine.detect_anomalies else None

    def _work(self, places: Any) -> LocalDraw:
        """Return what some clients do in every round."""
        work = jax.tree.map(jnp.asarray, self.fixed.work)
        return work if work.tau.ndim == 0 else work.of(places)


def _scaled(factor: Any, tree: PyTree) -> PyTree:
    """Return a tree times a factor, of which None stands for one."""
    return tree if factor is None else trees.scale(factor, tree)


def _repeats(ids: Any) -> Any:
    """Return how often each id of a sorted array stood before it."""
    if isinstance(ids, np.ndarray):
        return occurrences(ids)
    return jnp.arange(len(ids), dtype=jnp.int32) - jnp.searchsorted(ids, ids).astype(jnp.int32)
