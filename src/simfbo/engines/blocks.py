"""Many rounds in one compiled call: `method.round`, traced as it stands.

The verb is traced too (`_Traced`). What the server draws (cohorts, local work, drop-outs) is drawn
on the host before the call, from the same keys as one round at a time: a first trace of a round
(`_Listener`) finds which keys that are. What the runner has to know of every round (norms, who was
admitted, what is compared) comes out of the call, and the ledger is counted by arithmetic.

The number of rounds is an input of the program, so however a run is cut into blocks, and wherever
it is interrupted and resumed, every round is computed by the same instructions: bit for bit the
same. A round in which something unusual happens (too few replies, a variable that explodes) ends
the block before it, and the runner does it again on the host.
"""

import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from simfbo.codecs.messages import REQUEST_BYTES, Codecs
from simfbo.core import trees
from simfbo.core.exchange import Request
from simfbo.core.federation import View
from simfbo.core.ledger import Octets
from simfbo.core.method import Method, Parts
from simfbo.core.problem import Point, PyTree, point_of
from simfbo.engines._cohort import Found
from simfbo.engines._messages import form
from simfbo.engines._notes import Notes, flat
from simfbo.engines._script import Script, as_inputs
from simfbo.engines._server import Row, Server
from simfbo.engines._traced import NeedsHost, Noted, Traced, listen, traced_round
from simfbo.engines.compile_cache import PROGRAMS
from simfbo.engines.simulated import SimulatedFederation, exchange_of
from simfbo.robust import anomalies

LONGEST = 256  # rounds in a block
_NOTES = 2**22  # numbers that come out of a block, about

Measure = Callable[[dict[str, PyTree]], PyTree]
Program = Callable[..., Any]


class _Given(NamedTuple):
    """The inputs of a block.

    Attributes:
        state: of the method.
        memory: what the clients remember.
        numbers: of the method.
        data: the clients' data, by exchange.
        fixed: what the server draws alike in every round.
        drawn: what it draws anew, by round.
        root: the key that those of rounds are folded from.
        number: of the first exchange.
        first: the number of the first round.
        looks: which exchanges are looked at, by round; None where none ever is.
        limits: of the norms, to be multiplied by the square of a round's number.
        every: rounds between two that are measured.
    """

    state: PyTree
    memory: PyTree
    numbers: tuple[Any, ...]
    data: PyTree
    fixed: PyTree
    drawn: PyTree
    root: jax.Array
    number: Any
    first: Any
    looks: Any
    limits: Any
    every: Any


class _Compiled(NamedTuple):
    """What a block does: the script of its rounds, how many it can hold, program and notes."""

    script: Script
    length: int
    program: Program
    notes: Notes


class Outcome(NamedTuple):
    """What came out of a block.

    Attributes:
        state: after its last round.
        done: rounds completed; fewer than asked for where the next one is unusual.
        norms: of x, y and v, as far as there are, after the last round.
        measured: what `measure` returned, by round.
        exchanges: what is known of every exchange, by round.
        drawn: what the server drew, by round.
    """

    state: PyTree
    done: int
    norms: np.ndarray
    measured: PyTree
    exchanges: list[Noted]
    drawn: list[Any]


class Blocks:
    """Runs blocks of rounds of one method on one engine."""

    def __init__(
        self, engine: SimulatedFederation, method: Parts, server: Server, compiled: _Compiled
    ) -> None:
        """Take the engine, the method, and what was compiled for both."""
        self._engine, self._method, self._server = engine, method, server
        self._script, self.length, self._program, self._notes = compiled
        self._fixed = server.fixed
        self._data = [engine.data_for(one.layout) for one in self._script.exchanges]

    def run(
        self, state: PyTree, root: jax.Array, first: int, count: int, limits: np.ndarray, every: int
    ) -> Outcome:
        """Run the rounds first, first + 1, ...: `count`, or as many as a block holds.

        What the clients remember after them is in the engine.

        Args:
            state: the method's state.
            root: the key that those of rounds are folded from.
            first: the number of the first round.
            count: how many.
            limits: the norms of x, y and v, before they are multiplied by the square of a round's
                number, above which a round is unusual.
            every: rounds between two that are measured.
        """
        count, script = min(count, self.length), self._script
        rounds = script.draw(self._server, root, first, count)
        count = len(rounds) if script.events else count
        if not count:
            return Outcome(state, 0, np.zeros(len(limits)), (), [], [])
        engine = self._engine
        number = engine.ledger.total.rounds + 1
        given = _Given(
            state, engine.client_memory, self._method.numbers, self._data, self._fixed,
            as_inputs(self._server, rounds, self.length), root, np.int32(number), np.int32(first),
            self._looks(number) if engine.detect_anomalies else None,
            np.asarray(limits, jnp.result_type(float)), np.int32(every),
        )  # fmt: skip
        (after, kept), done, norms, notes = self._program(given, np.int32(count))
        if (done := int(done)) < count:  # `after` is the state after an unusual round
            again, _, found, _ = self._program(given, np.int32(done))
            (after, kept), norms = (again, found) if done else ((state, given.memory), norms)
        engine.client_memory = kept
        measured, exchanges = self._notes.unpacked(np.asarray(notes)[:done])
        return Outcome(after, done, np.asarray(norms, float), measured, exchanges, rounds[:done])

    def _looks(self, first: int) -> np.ndarray:
        """Return which exchanges are looked at, by round."""
        kinds = len(self._script.exchanges)
        if not self._engine.detect_anomalies:
            return np.zeros((self.length, kinds), bool)
        numbers = first + np.arange(self.length * kinds)
        return anomalies.looks_at(numbers).reshape(self.length, kinds)

    def replay(self, outcome: Outcome) -> Iterator[int]:
        """Let the engine count and look at what came out of a block, round after round.

        Yields:
            The places in the block of rounds in which there was something to look at, after the
            engine has.
        """
        engine, done = self._engine, outcome.done
        first, kinds = engine.ledger.total.rounds + 1, self._script.exchanges
        look = self._looks(first)[:done]
        rows = [self._script.rows(drawn) for drawn in outcome.drawn]
        for e, (one, note) in enumerate(zip(kinds, outcome.exchanges, strict=True)):
            if note.passed is not None:
                look[:, e] |= ~(note.passed > 0).all(1)
            absent = self._server.absent
            silent = sum(int(row[e].absent.sum()) for row in rows)
            if absent is not None:
                silent = done * int(absent.sum())
            asked = one.size * done
            coded = _octets(one.codecs, note, self._missing(rows, e, done))
            engine.ledger.record(one.name, asked, asked - silent, one.down, one.like, done, coded)
        for k in np.flatnonzero(look.any(1)).tolist():
            for e in np.flatnonzero(look[k]).tolist():
                self._look(outcome.exchanges[e], k, e, rows, first + k * len(kinds) + e)
            yield k

    def _missing(self, rows: list[list[Row]], e: int, done: int) -> np.ndarray:
        """Return who did not reply to an exchange, by round and position."""
        if self._server.absent is not None:
            return np.tile(self._server.absent, (done, 1))
        return np.array([row[e].absent for row in rows]).reshape(done, -1)

    def _look(self, note: Noted, k: int, e: int, rows: list[list[Row]], number: int) -> None:
        """Let the engine look at one exchange."""
        engine, one, server = self._engine, self._script.exchanges[e], self._server
        if rows:
            row = rows[k][e]
        else:
            assert server.cohort is not None
            row = server.draw_row(None, server.cohort)
        request = Request(number, one.name, row.cohort.ids, one.like)
        found = Found((), *(None if part is None else part[k] for part in note[:3]))
        exchange = exchange_of(request, found, row.absent, engine.rules(one.name))
        engine.latest = exchange
        engine.refusals += exchange.refusals
        engine.observe(exchange, row.cohort.weights, server.plan(row.work.of(row.cohort.ids)).norm)


def _octets(codecs: Codecs | None, note: Noted, absent: np.ndarray) -> Octets | None:
    """Return the bytes of all exchanges of one kind in a block, where messages are coded."""
    if codecs is None:
        return None
    down = absent.shape[1] * float((np.asarray(note.down, float) + REQUEST_BYTES).sum())
    up = float(np.asarray(note.octets, float)[~absent].sum())
    return Octets(down, up, 0.0 if codecs.exact_size else down + up)


def prepare(method: Method, federation: Any, state: PyTree, measure: Measure) -> Blocks | None:
    """Return what runs blocks of rounds; None where rounds need the host.

    Args:
        method: whose rounds.
        federation: on which they run.
        state: of the method, for its shapes.
        measure: what to take of the residuals (`Method.residuals`) in some rounds.
    """
    if not isinstance(federation, SimulatedFederation) or federation.secret:
        return None
    if federation.strategy == "lanes" or federation.gate.max_norm == "auto":
        return None
    if not all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(state)):
        return None  # a number of Python's, which may be anything
    server, parts = Server.of(federation), Parts.of(method)
    if server is None:
        return None
    engine = server.engine
    shape = form((state, engine.client_memory, server.fixed, engine.data.client(None)))
    key = parts.structure, server.form, shape, jnp.result_type(float), measure
    build = partial(_build, parts, server, state, measure)
    compiled = PROGRAMS.get(type(method).__name__, key, build)
    return None if compiled is None else Blocks(engine, parts, server, compiled)


def _build(method: Parts, server: Server, state: PyTree, measure: Measure) -> _Compiled | None:
    """Compile blocks of a method; None where a round cannot be traced."""
    engine, fixed = server.engine, server.fixed
    try:
        script = listen(method, server, fixed, state, LONGEST)
    except Exception as error:  # one of the author's is raised where the round runs by itself
        return _not_compiled(method, error)
    notes = sum(one.size * (2 + len(jax.tree.leaves(one.like))) for one in script.exchanges)
    length = max(1, min(LONGEST, _NOTES // max(1, notes)))
    count = sum(z is not None for z in method.joined().point(state))
    rounds = script.draw(server, jax.random.key(0), 1, 1)
    given = _Given(
        state, engine.client_memory, method.numbers,
        [engine.data_for(part.layout) for part in script.exchanges], fixed,
        as_inputs(server, rounds, length), jax.random.key(0), np.int32(1), np.int32(1),
        np.zeros((length, len(script.exchanges)), bool) if engine.detect_anomalies else None,
        np.zeros(count, jnp.result_type(float)), np.int32(1),
    )  # fmt: skip
    shapes: list[PyTree] = []
    job = partial(_block, method, script, server, measure, length, shapes)
    try:
        lowered = jax.jit(job).lower(given, np.int32(1))
    except Exception as error:
        return _not_compiled(method, error)
    return _Compiled(script, length, lowered.compile(), Notes.of(shapes[-1]))


_REASONS: dict[type[Exception], str] = {
    jax.errors.TracerBoolConversionError: "it branches on an array",
    jax.errors.TracerIntegerConversionError: "it needs an array as a whole number",
    jax.errors.TracerArrayConversionError: "it converts an array to NumPy",
    jax.errors.ConcretizationTypeError: "it needs the value of an array",
    jax.errors.NonConcreteBooleanIndexError: "the shape of an array depends on values",
    NeedsHost: "",
}
_PACKAGE = Path(__file__).parents[1]
_BELOW = (  # files below the method's code in a traceback
    str(_PACKAGE / "engines"),
    str(_PACKAGE / "core" / "federation.py"),
    *(str(Path(module.__file__ or "").parent) for module in (jax, eqx, np)),
    sysconfig.get_paths()["stdlib"],
)


def _not_compiled(method: Parts, error: Exception) -> None:
    """Warn that rounds run one at a time, with the reason and the line of the author's code.

    docs/explanation-performance.md lists what of the library needs the host.
    """
    reason = next((text for kind, text in _REASONS.items() if isinstance(error, kind)), None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_BELOW)]
    if reason is None or not own or own[-1].filename.startswith(str(_PACKAGE)):
        return
    at = own[-1]
    warnings.warn(
        f"Rounds of {method.joined().name} run one at a time: {reason or error} at line "
        f"{at.lineno} of {Path(at.filename).name}, '{at.line}'.",
        stacklevel=2,
    )


def _block(
    parts: Parts,
    script: Script,
    server: Server,
    measure: Measure,
    length: int,
    shapes: list[PyTree],
    given: _Given,
    count: jax.Array,
) -> tuple[PyTree, jax.Array, jax.Array, jax.Array]:
    """Run up to `count` rounds.

    Returns:
        The state and what the clients remember, how many rounds were as usual, the norms after the
        last, and a row of notes for every round. `shapes` receives what is in a row.
    """
    method = parts._replace(numbers=given.numbers).joined()
    step = traced_round(method)

    def one(k: jax.Array, at: PyTree) -> tuple[PyTree, jax.Array, jax.Array, PyTree]:
        t = given.first + k
        row = jax.tree.map(lambda a: a[k], given.drawn)
        number = given.number + k * len(script.exchanges)
        state, memory = at
        looks = None if given.looks is None else given.looks[k]
        federation = Traced(server, given.fixed, script, given.data, row, number, looks, memory)
        view, sums = _listened(federation, method.residuals)
        after = step(state, view, jax.random.fold_in(given.root, t))
        norms = norms_of(method.point(after))
        limit = given.limits * jnp.square(t.astype(norms.dtype))
        usual = federation.usual & jnp.all(norms <= limit)
        due = (t % given.every == 0) | (t == 1)
        notes = _when(due, measure, sums), federation.notes
        return (after, federation.client_memory), usual, norms, notes

    def body(carry: PyTree) -> PyTree:
        k, _, state, _, notes = carry
        found = once(k, *jax.tree.leaves(state))
        state, usual, norms, found = jax.tree.unflatten(jax.tree.structure(like), found)
        return k + usual.astype(jnp.int32), usual, state, norms, notes.at[k].set(flat(found))

    zero = jnp.zeros((), jnp.int32)
    state = jax.tree.map(jnp.asarray, (given.state, given.memory))
    closed, like = jax.make_jaxpr(one, return_shape=True)(zero, state)
    once = jaxpr_as_fun(closed)  # traced once, and not again by the loop
    notes = jnp.zeros((length, Notes.of(like[3]).width))
    carry = zero, jnp.ones((), bool), state, jnp.zeros_like(given.limits), notes
    k, _, state, norms, notes = jax.lax.while_loop(
        lambda carry: (carry[0] < count) & carry[1], body, carry
    )
    shapes.append(like[3])
    return state, k, norms, notes


def _listened(federation: Traced, channels: Any) -> tuple[Any, dict[str, PyTree]]:
    """Return the federation, and where it puts the sums that are residuals."""
    sums: dict[str, PyTree] = {}

    def spy(client_step: Any, *rest: Any) -> PyTree:
        found = federation.sum(client_step, *rest)
        for name in channels.get(client_step.__name__, ""):
            sums[name] = getattr(point_of(found), name)
        return found

    return View(federation, spy, federation.gather) if channels else federation, sums


def _when(due: jax.Array, measure: Measure, sums: dict[str, PyTree]) -> PyTree:
    """Return what `measure` returns if that is due, else zeros."""
    if not sums:
        return ()
    like = jax.eval_shape(measure, sums)
    return jax.lax.cond(due, measure, lambda _: trees.zeros_like(like), sums)


def norms_of(point: Point[PyTree]) -> jax.Array:
    """Return the norms of the variables that a method has."""
    variables = [z for z in point if z is not None]
    return jnp.stack([jnp.sqrt(trees.squared_norm(z)).astype(float) for z in variables])
