"""Many rounds in one compiled program: `Method.round`, traced as it stands.

The number of rounds is an input of the program, so however a run is divided into calls, and
wherever it is interrupted and resumed, every round is computed by the same instructions: bit for
bit the same. A round with too few replies, or in which a variable explodes, ends the call before
it, and the runner repeats it on the host. What happened in the rounds comes out as one
`ExchangeReport` for each exchange, stacked over rounds.
"""

import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from simfbo.codecs.messages import REQUEST_BYTES
from simfbo.core import keys, trees
from simfbo.core import memory as memories
from simfbo.core.exchange import EncodedBytes, ExchangeReport, Refusal
from simfbo.core.federation import ClientStep, Federation
from simfbo.core.gate import limit_of
from simfbo.core.ledger import Ledger
from simfbo.core.method import Method, Parts, as_module
from simfbo.core.problem import Point, PyTree, Scalar, point_of
from simfbo.core.sampling import Cohort
from simfbo.engines.base import PROGRAMS, exchange_of
from simfbo.engines.exchange import Clients, exchange, form
from simfbo.engines.simulated import SimulatedFederation
from simfbo.errors import NeedsHost, UserError
from simfbo.robust import anomalies

LONGEST = 256  # rounds in a call
_NUMBERS = 2**22  # in the reports of a call, about

Measure = Callable[[dict[str, PyTree]], PyTree]
Reports = tuple[ExchangeReport, ...]
Count = Int[Any, ""]  # a NumPy number outside of the program, an array inside
Program = Callable[["Inputs", Count], tuple[PyTree, Count, Array, PyTree, Reports]]


class Inputs(NamedTuple):
    """The inputs of the program.

    Attributes:
        numbers: of the method.
        clients: the clients and the rules.
        state: of the method.
        memory: of the clients.
        root: the key that those of rounds are folded from.
        number: of the first exchange.
        first: the number of the first round.
        fewest: replies that an exchange needs.
        limits: of the norms of x, y and v, to be multiplied by the square of a round's number.
        every: rounds between two whose residuals are measured.
    """

    numbers: tuple[Scalar, ...]
    clients: Clients
    state: PyTree
    memory: PyTree
    root: Key[Array, ""]
    number: Count
    first: Count
    fewest: Count
    limits: Float[Any, " variables"]
    every: Count


class Outcome(NamedTuple):
    """The result of a call.

    Attributes:
        state: after its last round.
        done: rounds completed; fewer than asked for if the next one needs the host.
        norms: of x, y and v, as far as there are, after the last round.
        residuals: what `measure` returned after each round in which it was due.
        reports: of the exchanges of a round, stacked over rounds.
    """

    state: PyTree
    done: int
    norms: Float[np.ndarray, " variables"]
    residuals: PyTree
    reports: Reports


class Tape:
    """A federation in the trace of a round; it records a report for each exchange.

    Attributes:
        memory: of all clients after the exchanges so far.
        number: of the next exchange.
        reports: of the exchanges so far.
        sums: by channel, the sums that vanish at the solution (`Method.residuals`).
    """

    secret = False
    ledger: Ledger
    refusals: list[Refusal]

    def __init__(
        self, clients: Clients, memory: PyTree, number: Count, channels: Mapping[str, str]
    ) -> None:
        """Begin a round, given the number of its first exchange and `Method.residuals`."""
        self._clients, self._channels = clients, channels
        self.memory, self.number = memory, number
        self.reports: list[ExchangeReport] = []
        self.sums: dict[str, PyTree] = {}

    @property
    def n(self) -> int:
        """The number of clients."""
        return self._clients.n

    @property
    def p(self) -> Float[Any, " n"]:
        """The clients' weights p_i."""
        return self._clients.p

    @property
    def latest(self) -> Any:
        """The latest exchange, of which only the factor is known in a trace."""
        return _Latest(self.reports[-1].factor) if self.reports else None

    def __getattr__(self, name: str) -> Any:
        """Raise: ledger, rejected replies and the like are known after the rounds."""
        raise NeedsHost(f"it reads federation.{name}")

    def cohort(self, key: Key[Array, ""]) -> Cohort:
        """Sample the clients that take part."""
        return self._clients.sampler(key, self._clients.p)

    def mean_norm(self, key: Key[Array, ""]) -> Scalar | None:
        """Rho where the server assigns the local work; None otherwise."""
        work = self._clients.work
        return work.mean_norm(key, self._clients.p) if work.assigned else None

    def sum(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: Key[Array, ""]
    ) -> PyTree:
        """Sum w_i client_step(payload, client_i) over the cohort; see `Federation`."""
        total = self._exchange(False, client_step, payload, cohort, key)
        for channel in self._channels.get(client_step.__name__, ""):
            self.sums[channel] = getattr(point_of(total), channel)
        return total

    def gather(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: Key[Array, ""]
    ) -> PyTree:
        """Stack the cohort's messages; see `Federation`."""
        return self._exchange(True, client_step, payload, cohort, key)

    def _exchange(
        self, stack: bool, step: ClientStep, payload: PyTree, cohort: Cohort, key: Key[Array, ""]
    ) -> PyTree:
        given = as_module(step), payload, cohort, key, self.memory, stack, self.number
        total, rows, report = exchange(self._clients, *given)
        if self.memory is not None:
            self.memory = memories.kept(self.memory, rows, cohort.ids, report.admitted)
        self.reports.append(report)
        self.number = self.number + 1
        return total

    def when(
        self, condition: Bool[Array, ""], branch: Callable[[], PyTree], otherwise: PyTree
    ) -> PyTree:
        """Run a branch if a condition holds; its exchanges are in the program either way."""
        before = self.memory, self.number, self.reports, self.sums

        def run() -> tuple[PyTree, Count, Reports]:
            self.memory, self.number, self.reports, self.sums = None, before[1], [], {}
            value = jax.tree.map(jnp.asarray, branch())
            return value, self.number, tuple(self.reports)

        try:
            closed, like = jax.make_jaxpr(run, return_shape=True)()
        finally:
            self.memory, self.number, self.reports, self.sums = before
        value, _, reports = like
        if form(value) != form(otherwise := jax.tree.map(jnp.asarray, otherwise)):
            raise NeedsHost("the branch of federation.when returns another shape or dtype")
        leaves = jax.tree.leaves((otherwise, self.number, trees.zeros_like(reports)))
        found = jax.lax.cond(condition, jaxpr_as_fun(closed), lambda: [*map(jnp.asarray, leaves)])
        value, self.number, reports = jax.tree.unflatten(jax.tree.structure(like), found)
        for report in reports:
            inner = report.took_place
            took = condition if inner is None else condition & inner
            self.reports.append(replace(report, took_place=took))
        return value


class _Latest:
    """The latest exchange in the trace of a round."""

    def __init__(self, factor: Scalar) -> None:
        self.factor = factor

    def __getattr__(self, name: str) -> Any:
        raise NeedsHost(f"it reads federation.latest.{name}")


class Rounds:
    """Runs compiled rounds of a method on an engine.

    Attributes:
        length: the most rounds of a call.
    """

    def __init__(
        self, engine: SimulatedFederation, method: Parts, program: Program, length: int
    ) -> None:
        """Take the engine, the method, and the program for both."""
        self._engine, self._method, self._program, self.length = engine, method, program, length
        self._clients: Clients | None = None  # in the latest inputs

    def run(
        self,
        state: PyTree,
        root: Key[Array, ""],
        first: int,
        count: int,
        limits: Float[np.ndarray, " variables"],
        every: int,
    ) -> Outcome:
        """Run the rounds first, first + 1, ...: `count`, or as many as one call allows.

        The memory of the clients is in the engine.

        Args:
            state: the method's state.
            root: the key that those of rounds are folded from.
            first: the number of the first round.
            count: the number of rounds.
            limits: the norms of x, y and v, before they are multiplied by the square of a round's
                number, above which a round is left to the host.
            every: rounds between two whose residuals are measured.
        """
        engine, count = self._engine, min(count, self.length)
        clients = engine.clients(limit_of(engine.gate))
        if clients is not self._clients:  # on the device, so that no call copies them
            inputs = _inputs(engine, self._method, state, root, every)
            self._clients, self._inputs = clients, jax.device_put(inputs)
        number = np.int32(engine.ledger.total.rounds + 1)
        given = self._inputs._replace(
            state=state,
            memory=engine.client_memory,
            number=number,
            first=np.int32(first),
            limits=limits,
        )
        (after, memory), done, norms, residuals, reports = self._program(given, np.int32(count))
        done = int(done)
        if keys.FAILED:
            error = keys.FAILED[0]
            keys.FAILED.clear()
            raise error
        if done < count:  # `after` is the state after a round that does not count
            (after, memory), _, norms, residuals, _ = self._program(given, np.int32(done))
        if done:
            engine.client_memory = memory
        residuals = jax.tree.map(np.asarray, residuals)
        reports = jax.tree.map(lambda a: np.asarray(a)[:done], reports)
        return Outcome(after if done else state, done, np.asarray(norms, float), residuals, reports)

    def account(self, outcome: Outcome) -> Iterator[int]:
        """Enter the rounds of a call in the ledger; report rejected replies and anomalies.

        Yields:
            The places in the call of rounds with rejected replies or compared messages, one by one:
            the engine holds those of the round until the next one.
        """
        engine, done, reports = self._engine, outcome.done, outcome.reports
        before = engine.ledger.total.rounds
        for report in reports:
            self._count(report, done)
        compared = [engine.detect_anomalies or report.admitted is not None for report in reports]
        if not any(compared):
            return
        always = np.ones(done, bool)
        took = [always if one.took_place is None else one.took_place for one in reports]
        took = np.stack(took, 1)
        number = before + np.cumsum(took).reshape(took.shape)
        look = np.zeros_like(took)
        if engine.detect_anomalies and number.size:
            look = anomalies.looks_at(number)
        for e, report in enumerate(reports):
            if report.admitted is not None:
                look[:, e] |= ~report.admitted.all(1)
        look &= took
        for k in np.flatnonzero(look.any(1)).tolist():
            for e in np.flatnonzero(look[k]).tolist():
                report = jax.tree.map(lambda a, k=k: a[k], reports[e])
                rules = engine.rules(report.client_step)
                engine.latest = exchange_of(report, int(number[k, e]), rules, None)
                engine.refusals += engine.latest.refusals
                engine.observe(engine.latest)
            yield k

    def _count(self, report: ExchangeReport, done: int) -> None:
        """Enter one exchange of `done` rounds in the ledger."""
        there = slice(None) if report.took_place is None else report.took_place
        exchanges = done if report.took_place is None else int(report.took_place.sum())
        asked = replies = exchanges * report.asked
        if report.replied is not None:
            replies = int(report.replied[there].sum())
        coded, codecs = None, self._engine.codecs
        if report.up is not None and report.down is not None and codecs is not None:
            sent = report.up[there].astype(float)
            up = float((sent if report.replied is None else sent[report.replied[there]]).sum())
            down = report.asked * float((report.down[there].astype(float) + REQUEST_BYTES).sum())
            coded = EncodedBytes(down, up, 0.0 if codecs.exact_size else down + up)
        if exchanges:
            self._engine.ledger.record(
                report.client_step,
                asked,
                replies,
                report.payload.tree,
                report.message.tree,
                exchanges,
                coded,
            )


def prepare(
    method: Method, federation: Federation, state: PyTree, measure: Measure
) -> Rounds | None:
    """Compile rounds; None where they run one at a time on the host.

    Args:
        method: the method.
        federation: its federation.
        state: of the method, for its shapes.
        measure: computes what is kept of the residuals (`Method.residuals`).
    """
    if not isinstance(federation, SimulatedFederation) or federation.secret:
        return None
    if federation.strategy == "lanes" or federation.gate.max_norm == "auto":
        return None
    if federation.requires_distinct and federation.draws[0].repeats:
        return None  # every cohort is checked
    if not all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(state)):
        return None  # a number of Python's, which may be anything
    parts = Parts.of(method)
    given = _inputs(federation, parts, state, jax.random.key(0), 1)
    leaves, structure = jax.tree.flatten(given)
    key = "rounds", parts.structure, structure, form(leaves), measure
    build = partial(_build, parts, given, measure)
    compiled = PROGRAMS.get(type(method).__name__, key, build)
    return None if compiled is None else Rounds(federation, parts, *compiled)


def _inputs(
    engine: SimulatedFederation, method: Parts, state: PyTree, root: Key[Array, ""], every: int
) -> Inputs:
    """Inputs of the program for round 1.

    Where only replies that are not finite are rejected, none is checked: a round whose sum is not
    finite is repeated on the host.
    """
    clients = engine.clients(limit_of(engine.gate))
    if clients.limit == np.inf and clients.absence is None and not clients.detect:
        clients = replace(clients, checks=False)
    norms = sum(z is not None for z in method.joined().point(state))
    return Inputs(
        method.numbers,
        clients,
        state,
        engine.client_memory,
        root,
        np.int32(1),
        np.int32(1),
        np.int32(max(1, engine.gate.min_replies)),
        np.zeros(norms, jnp.result_type(float)),
        np.int32(every),
    )


def _build(method: Parts, given: Inputs, measure: Measure) -> tuple[Program, int] | None:
    """Compile rounds, and find out how many one call allows; None if they cannot be compiled."""
    try:
        lowered = jax.jit(partial(_rounds, method, measure)).lower(given, np.int32(1))
        *_, residuals, reports = lowered.out_info
        rows = jax.tree.leaves((residuals, reports))
        return lowered.compile(), rows[0].shape[0] if rows else LONGEST
    except UserError:
        raise
    except Exception as error:  # an error of the author's is raised again on the host
        _warn(method, error)
        return None


def _rounds(
    parts: Parts, measure: Measure, given: Inputs, count: Count
) -> tuple[PyTree, Count, Float[Array, " variables"], PyTree, Reports]:
    """Run up to `count` rounds, until one is not as usual.

    The inner loop ends with a round whose residuals are measured. So they cost nothing in all other
    rounds, and every round is computed by the same instructions.

    Returns:
        The state and the clients' memory, how many rounds were as usual, the norms after the last,
        and residuals and reports.
    """
    method = parts._replace(numbers=given.numbers).joined()

    def one(k: Count, at: PyTree) -> PyTree:
        state, memory, number = at
        t = given.first + k
        tape = Tape(given.clients, memory, number, method.residuals)
        after = method.round(state, tape, jax.random.fold_in(given.root, t))
        norms = norms_of(method.point(after))
        usual = jnp.all(norms <= given.limits * jnp.square(t.astype(norms.dtype)))
        for report in tape.reports:
            if report.admitted is None:
                enough = report.finite & (report.asked >= given.fewest)
            else:
                enough = jnp.sum(report.admitted, dtype=jnp.int32) >= given.fewest
            usual &= enough if report.took_place is None else enough | ~report.took_place
        reports = tuple(replace(report, finite=None) for report in tape.reports)
        at = after, tape.memory, tape.number
        return at, usual, norms, tape.sums, jax.tree.map(jnp.asarray, reports)

    zero = jnp.zeros((), jnp.int32)
    start = jax.tree.map(jnp.asarray, (given.state, given.memory, given.number))
    closed, like = jax.make_jaxpr(one, return_shape=True)(zero, start)
    if form(start) != form(like[0]):
        raise NeedsHost("the structure, a shape or a dtype of its state changes")
    once = jaxpr_as_fun(closed)  # traced once, and not again by the loop
    *_, sums, reports = like
    residuals = jax.eval_shape(measure, sums) if sums else {}
    numbers = sum(leaf.size for leaf in jax.tree.leaves((residuals, reports)))
    length = max(1, min(LONGEST, _NUMBERS // max(1, numbers)))
    rows = jax.tree.map(lambda a: jnp.zeros((length, *a.shape), a.dtype), (residuals, reports))

    def body(carry: PyTree) -> PyTree:
        k, _, at, *_, reports = carry
        found = map(jnp.asarray, once(k, *jax.tree.leaves(at)))
        at, usual, norms, sums, new = jax.tree.unflatten(jax.tree.structure(like), found)
        reports = jax.tree.map(partial(_put, k), reports, new)
        return k + usual.astype(jnp.int32), usual, at, norms, sums, reports

    def until_measured(carry: PyTree) -> PyTree:
        (k, *rest), residuals, m = carry
        t = given.first + k
        end = jnp.where(t == 1, k + 1, k + 1 + jnp.mod(-t, given.every))
        end = jnp.minimum(end, count)
        inner = jax.lax.while_loop(lambda c: (c[0] < end) & c[1], body, (k, *rest))
        if sums:
            residuals = jax.tree.map(partial(_put, m), residuals, measure(inner[4]))
        return inner, residuals, m + 1

    first = zero, jnp.ones((), bool), start, jnp.zeros_like(given.limits), trees.zeros_like(sums)
    (k, _, (state, memory, _), norms, _, reports), residuals, _ = jax.lax.while_loop(
        lambda carry: (carry[0][0] < count) & carry[0][1],
        until_measured,
        ((*first, rows[1]), rows[0], zero),
    )
    return (state, memory), k, norms, residuals, reports


def _put(k: Count, rows: Shaped[Array, "rows ..."], row: Shaped[Array, "..."]) -> Array:
    """Replace row k; an unsigned index needs no check for negative ones."""
    return jax.lax.dynamic_update_index_in_dim(rows, row, k.astype(jnp.uint32), 0)


def norms_of(point: Point[PyTree]) -> Float[Array, " variables"]:
    """Compute the norms of the variables that a method has."""
    variables = [z for z in point if z is not None]
    return jnp.stack([jnp.sqrt(trees.squared_norm(z)).astype(float) for z in variables])


_REASONS: dict[type[Exception], str] = {
    jax.errors.TracerBoolConversionError: "it branches on an array",
    jax.errors.TracerIntegerConversionError: "it needs an array as a whole number",
    jax.errors.TracerArrayConversionError: "it converts an array to NumPy",
    jax.errors.ConcretizationTypeError: "it needs the value of an array",
    jax.errors.NonConcreteBooleanIndexError: "the shape of an array depends on values",
}
_PACKAGE = Path(__file__).parents[1]
_BELOW = (  # files below the method's code in a traceback
    str(_PACKAGE / "engines"),
    str(_PACKAGE / "core" / "federation.py"),
    str(_PACKAGE / "core" / "sampling.py"),
    str(_PACKAGE / "core" / "keys.py"),
    *(str(Path(module.__file__ or "").parent) for module in (jax, eqx, np)),
    sysconfig.get_paths()["stdlib"],
)


def _warn(method: Parts, error: Exception) -> None:
    """Warn that rounds run one at a time, with the reason and the line of the author's code.

    A `NeedsHost` without a text is a choice of the engine, such as two threads for networks.
    """
    kinds = (text for kind, text in _REASONS.items() if isinstance(error, kind))
    reason = next(kinds, str(error) if isinstance(error, NeedsHost) else None)
    if reason == "":
        return
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_BELOW)]
    place = ""
    if own and not own[-1].filename.startswith(str(_PACKAGE)):
        at = own[-1]
        place = f" at line {at.lineno} of {Path(at.filename).name}, '{at.line}'"
    elif isinstance(error, tuple(_REASONS)):
        return  # a method of the library: docs/explanation-performance.md lists them
    if reason is None:
        reason = f"tracing failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    warnings.warn(
        f"Rounds of {method.joined().name} run one at a time: {reason}{place}.", stacklevel=2
    )
