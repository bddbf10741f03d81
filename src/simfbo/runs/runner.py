"""The one runner: any algorithm on any federation."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from simfbo.core import trees
from simfbo.core.federation import Federation
from simfbo.core.method import Method
from simfbo.core.problem import Point, PyTree
from simfbo.core.validation import variable
from simfbo.engines.rounds import norms_of
from simfbo.errors import ClientWarning, ResumableError, TooFewReplies
from simfbo.runs.beginnings import (
    first_memory,
    header_of,
    require_arrays,
    require_runnable,
    restored,
    whole_numbers,
    with_clients,
)
from simfbo.runs.client_metrics import Asked, Evaluation, evaluation_of
from simfbo.runs.client_scores import is_column, line_of
from simfbo.runs.endings import exploded, not_finite, starved
from simfbo.runs.files import Json
from simfbo.runs.history import History
from simfbo.runs.inputs import inputs_of
from simfbo.runs.interrupts import Interrupts, held_back
from simfbo.runs.pace import Pace, clocks
from simfbo.runs.progress import shown
from simfbo.runs.records import record_of
from simfbo.runs.replies import taken_refusals, taken_suspicions
from simfbo.runs.run_log import Progress, RunLog
from simfbo.runs.trackers.tracking import Track, Tracking
from simfbo.runs.verdict import Residuals, verdict

Evaluate = Callable[[Any], dict[str, float]]
OnRound = Callable[[int, Json | None], None]
Until = Callable[[Sequence[Json]], bool]
_norms_of = jax.jit(norms_of)


def run(
    algorithm: Method,
    federation: Federation,
    x0: PyTree,
    y0: PyTree,
    *,
    rounds: int,
    seed: int = 0,
    evaluate: Evaluate | None = None,
    client_metrics: Asked | None = None,
    every: int | None = None,
    directory: str | Path | None = None,
    config: Json | None = None,
    about: Json | None = None,
    on_round: OnRound | None = None,
    on_progress: OnRound | None = None,
    until: Until | None = None,
    track: Track | Tracking | None = None,
    progress: bool = False,
    resume: bool = False,
    checkpoint_seconds: float = 5.0,
    explosion: float = 1e6,
) -> History:
    """Run `rounds` iterations of an algorithm.

    With a directory, checkpoints are written next to the history: a run that was killed,
    interrupted or ended for lack of replies can be resumed, and ends bit for bit as if it had never
    stopped.

    Iterations that need nothing from the host run many at a time in one compiled call, on a
    `SimulatedFederation` with small models; the numbers do not depend on how many. Such a block
    ends at the next evaluation.

    Ctrl-C writes a checkpoint and ends the run as interrupted. If a metric or variable is not
    finite, or the norm of a variable explodes, the run ends as diverged; the last good checkpoint
    is kept.

    Args:
        algorithm: what to run.
        federation: what to run it on; its ledger keeps counting.
        x0: initial upper variable.
        y0: initial lower variable.
        rounds: iterations (calls of `algorithm.round`).
        seed: determines every random draw.
        evaluate: (point) -> metrics by name, of a `Point` with the x, y and v of an iteration.
        client_metrics: what clients measure on their upper samples whenever a state is evaluated,
            by name: (x, y, batch) -> a number, or a `ClientMetric`, which also says whether it
            should be large. `{"upper_loss": problem.upper}`, or a task's `client_metrics`. All
            clients are asked, in one exchange that the ledger counts apart from training; records
            get the mean, the worst and quantiles, and `history.client_scores` every client.
        every: iterations between evaluations; the start and the last iteration are always
            evaluated. By default every iteration is, or none but these if nothing is evaluated.
        directory: where to write `history.jsonl` and checkpoints; nothing is written by default.
        config: stored in the history's header; a run is resumed with the same one only, and with
            the same data and numbers in algorithm and federation.
        about: stored in the header too, for whoever reads the history.
        on_round: called after every iteration with its number and its record, which is None if the
            iteration was not evaluated. Iterations then run one at a time.
        on_progress: the same, but called only after every block of iterations, with the last one.
        until: (records so far) -> whether to end the run now, as finished; called after every
            evaluation.
        track: where records go besides the history, such as "mlflow", "tensorboard:FOLDER" or a
            list of these (`simfbo.trackers`). A resumed run goes on in the same place, and a
            tracker that fails is dropped with a warning.
        progress: show a bar with the time left and the metrics, in a terminal or notebook.
        resume: continue the run in `directory`, if there is one.
        checkpoint_seconds: the time between checkpoints.
        explosion: the run has diverged when the norm of x, y or v after t rounds exceeds this many
            times t^2 times its norm at the start (or after the first round, or 1, whichever is
            largest).

    Returns:
        The history; `.state` is the `Point` of the last iteration.

    Example:
        >>> from simfbo import Point, SimulatedFederation, run
        >>> from simfbo.algorithms import simfbo
        >>> from simfbo.tasks import quadratic
        >>> task = quadratic()
        >>> history = run(
        ...     simfbo(task.problem, Point(x=0.1, y=0.2, v=0.2)),
        ...     SimulatedFederation(task.data),
        ...     task.x0,
        ...     task.y0,
        ...     rounds=200,
        ...     evaluate=task.evaluate,
        ...     every=50,
        ... )
        >>> history.records[-1]["x_error"] < 0.1
        True
    """
    require_runnable(algorithm, federation)
    rounds, every, seed = whole_numbers(rounds, every, seed)
    every = every or (rounds if evaluate is None and client_metrics is None else 1)
    x0, y0 = variable(x0, "x0"), variable(y0, "y0")
    first_state = algorithm.init(x0, y0)
    clients = None if client_metrics is None else evaluation_of(client_metrics, algorithm)
    header = header_of(algorithm, federation, rounds, every, seed, config, about)
    if clients is not None:
        header = with_clients(header, clients.goals)
    folder = None if directory is None else Path(directory)
    if folder is not None:
        require_arrays(algorithm.name, first_state)
        header["inputs"] = inputs_of(algorithm, federation)
    engine: Any = federation
    if getattr(federation, "codecs", None) is not None:
        engine.start = Point(*trees.on_device((x0, y0)))
    own = not isinstance(track, Tracking)
    tracking = Tracking(track, folder) if own else track
    log = RunLog(folder, header, checkpoint_seconds, tracking)
    kept = first_memory(algorithm, federation, x0, y0)
    first = Progress(-1, first_state, federation.ledger.copied(), client_memory=kept)
    residuals = Residuals(algorithm, federation, rounds)
    with contextlib.ExitStack() as stack:
        if own:
            stack.enter_context(tracking)
        display = stack.enter_context(shown(progress, algorithm.name, rounds, header["about"]))
        callbacks = _Callbacks(tuple(filter(None, (on_round, on_progress, display))), until)
        pace = Pace(algorithm, federation, seed, rounds, every, one_by_one=on_round is not None)
        at = algorithm.point(first_state)
        names = [name for name, z in at._asdict().items() if z is not None]
        job = _Job(
            algorithm,
            algorithm.round,
            algorithm.point,
            algorithm.counters,
            names,
            federation,
            evaluate,
            clients,
            callbacks,
            rounds,
            every,
            log,
            residuals,
            explosion,
        )
        interrupts = stack.enter_context(held_back())
        stack.enter_context(contextlib.closing(log))
        begun = log.resume(first) if resume else log.start(first)
        with interrupts.allowed():
            log.begin_tracking()
        return _iterate(job, begun, pace, interrupts)


class _Callbacks(NamedTuple):
    """What is called during a run; see `run`."""

    on_progress: tuple[OnRound, ...]
    until: Until | None

    def call(self, t: int, record: Json | None) -> None:
        """Say how far a run is."""
        for one in self.on_progress:
            one(t, record)


class _Job(NamedTuple):
    """What does not change during a run.

    The method's functions are taken once: Equinox makes an object of them each time.
    """

    algorithm: Method
    iterate: Callable[..., Any]
    point: Callable[[Any], Point[PyTree]]
    counters: Callable[[Any], dict[str, int]]
    names: list[str]
    federation: Federation
    evaluate: Evaluate | None
    clients: Evaluation | None
    callbacks: _Callbacks
    rounds: int
    every: int
    log: RunLog
    residuals: Residuals
    explosion: float


class _Diverged(Exception):
    """A variable or metric diverged; carries the progress and the end of the history."""


def _iterate(job: _Job, at: Progress, pace: Pace, interrupts: Interrupts) -> History:
    """Run the remaining iterations; return the history.

    Only iterations and evaluations are interrupted, never a save.
    """
    log, over = job.log, False
    engine = restored(job.federation, at)
    try:
        while at.round < job.rounds and not over:
            with interrupts.allowed():
                at, record = _advance(job, at, pace)
                job.callbacks.call(at.round, record)
                if record is not None and job.callbacks.until is not None:
                    over = job.callbacks.until(log.history.records)
            log.save_when_due(at)
            if log.saved_round == at.round and hasattr(engine, "saved"):
                engine.saved()
        end: Json = {"status": "finished"}
        log.save(at)
    except KeyboardInterrupt:
        end = {"status": "interrupted"}
        log.keep(at)
        # A second Ctrl-C skips this last evaluation.
        last: list[Json] = []
        with contextlib.suppress(KeyboardInterrupt), interrupts.allowed():
            last = _last_record(job, at, pace)
        log.add("record", *last, track=False)
    except TooFewReplies as error:
        end = starved(error, at.round + 1)
        if end["status"] == "starved":
            log.save(at)
        log.add("refusal", *taken_refusals(job.federation, at.round + 1))
        log.add("record", *_last_record(job, at, None), track=False)
    except _Diverged as error:
        at, end = error.args
        log.add("record", *_last_record(job, at, pace))
    except Exception:  # of an evaluation, or of a callback that prints to a closed pipe
        with contextlib.suppress(OSError, ResumableError):
            log.keep(at)
        raise
    log.history.state, log.history.method_state = job.point(at.state), at.state
    engine.client_memory = at.client_memory
    if end["status"] != "finished":
        return log.end(end)
    measured = job.algorithm.evidence(at.state)
    losses = [record.get("upper_loss", record.get("test_loss")) for record in log.history.records]
    return log.end(end, verdict(at.residuals, measured, [one for one in losses if one is not None]))


class _Step(NamedTuple):
    """What one or several iterations led to.

    Attributes:
        round: the last of them.
        state: after it.
        norms: of its variables.
        seen: residuals so far.
        refused: the number of excluded replies in them.
    """

    round: int
    state: PyTree
    norms: np.ndarray
    seen: Any
    refused: int


def _advance(job: _Job, at: Progress, pace: Pace) -> tuple[Progress, Json | None]:
    """Run the next iterations; return the progress and the record of the last, if due.

    Iteration 0 only evaluates. Iterations are complete when all their lines are written; when they
    are interrupted before that, they do not count.
    """
    begin = clocks()
    state, refused = at.state, at.refused
    if at.round == 0:
        state = job.algorithm.prepare(state, job.federation, pace.key(1))
        refused += _write(job, 1)
    step = _several(job, at, state, pace) or _one(job, at, state, pace)
    t, norms, state = step.round, step.norms, step.state
    if t == job.rounds:
        state = job.algorithm.conclude(state, job.federation, pace.key(t))
        refused += _write(job, t)
    wall, cpu = clocks()
    pace.took(t - at.round, wall - begin[0])
    sizes = np.maximum(norms, at.sizes or 1.0).tolist() if t <= 1 else at.sizes
    after = Progress(
        t,
        state,
        job.federation.ledger.copied(),
        refused + step.refused,
        at.seconds + wall - begin[0],
        at.cpu_seconds + cpu - begin[1],
        job.log.add("record"),
        sizes,
        step.seen,
        getattr(job.federation, "observed", {}),
        getattr(job.federation, "client_memory", None),
    )
    latest = getattr(job.federation, "latest", None)
    end = exploded(job.names, norms.tolist(), sizes, job.explosion, t, latest)
    if end is not None:
        raise _Diverged(after, end)
    if t % job.every and t != job.rounds:
        return after, None
    after, record = _evaluated(job, after, pace)
    after = after._replace(written=job.log.add("record", record))
    # A client that did not reply is no sign of divergence.
    if end := not_finite({name: record[name] for name in record if not is_column(name)}):
        raise _Diverged(after, end)
    return after, record


def _one(job: _Job, at: Progress, state: PyTree, pace: Pace) -> _Step:
    """Run one iteration on the host."""
    t = at.round + 1
    job.residuals.begin(t)
    if t:
        state = job.iterate(state, job.residuals.federation, pace.key(t))
    if t:
        norms = np.asarray(_norms_of(job.point(state)), float)
    else:  # nothing is compiled for it
        norms = np.array([trees.host_norm(z) for z in job.point(state) if z is not None])
    seen = job.residuals.end(t, at.residuals)
    return _Step(t, state, norms, seen, _write(job, t))


def _several(job: _Job, at: Progress, state: PyTree, pace: Pace) -> _Step | None:
    """Run some iterations at once; None where the next one needs the host."""
    t = at.round + 1
    if not t or (compiled := pace.compiled(state)) is None:
        return None
    count = pace.count(t)
    limits = job.explosion * np.asarray(at.sizes) * (1.0 if t > 1 else np.inf)
    outcome = compiled.run(state, pace.root, t, count, limits, job.residuals.every)
    if not outcome.done:
        return None
    refused, last, seen = 0, t + outcome.done - 1, at.residuals
    for k in compiled.account(outcome):
        refused += _write(job, t + k)
    for place, r in enumerate(job.residuals.due_rounds(t, last)):
        found = {name: numbers[place] for name, numbers in outcome.residuals.items()}
        seen = job.residuals.added(r, seen, found)
    return _Step(last, outcome.state, outcome.norms, seen, refused)


def _write(job: _Job, t: int) -> int:
    """Write down who was excluded from iteration t, and who stood out; return how many were."""
    refusals = taken_refusals(job.federation, t)
    job.log.add("refusal", *refusals)
    _warn(job, t)
    return len(refusals)


def _warn(job: _Job, t: int) -> None:
    """Write down and warn of the clients that stand out."""
    lines = taken_suspicions(job.federation, t)
    for line in lines:
        warnings.warn(f"Iteration {t}: {line['text']}.", ClientWarning, stacklevel=7)
    job.log.add("warning", *lines)


def _last_record(job: _Job, at: Progress, pace: Pace | None) -> list[Json]:
    """Evaluate the last completed iteration, unless that was done; return its record."""
    records = job.log.history.records
    done = at.round < 0 or (records and records[-1]["round"] >= at.round)
    return [] if done else [_evaluated(job, at, pace)[1]]


def _evaluated(job: _Job, at: Progress, pace: Pace | None) -> tuple[Progress, Json]:
    """Evaluate a state, on the server and on the clients; return the progress and the record.

    Without a pace no client is asked.
    """
    metrics = job.evaluate(job.point(at.state)) if job.evaluate else {}
    counters = job.counters(at.state)
    if job.clients is None:
        return at, record_of(at, counters, metrics)
    engine = restored(job.federation, at)
    if pace is None:
        scores = job.clients.unknown(engine)
    else:
        scores = job.clients.ask(engine, at.state, pace.key(at.round))
    refused, observed = at.refused + _write(job, at.round), getattr(engine, "observed", {})
    at = at._replace(ledger=engine.ledger.copied(), refused=refused, observed=observed)
    job.log.add("clients", line_of(at.round, scores))
    return at, record_of(at, counters, metrics, scores.columns)
