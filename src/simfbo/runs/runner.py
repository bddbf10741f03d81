"""The one runner: any algorithm on any federation."""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.federation import Algorithm, Federation
from simfbo.core.problem import PyTree
from simfbo.errors import TooFewReplies, UserError
from simfbo.runs.history import History, versions
from simfbo.runs.run_log import Journal, Progress

Evaluate = Callable[[Any], dict[str, float]]
OnRound = Callable[[int, dict[str, Any] | None], None]


def run(
    algorithm: Algorithm,
    federation: Federation,
    x0: PyTree,
    y0: PyTree,
    *,
    rounds: int,
    seed: int = 0,
    evaluate: Evaluate | None = None,
    every: int = 1,
    directory: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    on_round: OnRound | None = None,
    resume: bool = False,
    checkpoint_seconds: float = 5.0,
    explosion: float = 1e6,
) -> History:
    """Return the history of `rounds` iterations of an algorithm.

    With a directory, checkpoints are written beside the history: a run that was killed, interrupted
    or left with too few replies goes on with `resume`, and ends bit for bit as it would have.

    Ctrl-C ends the run cleanly, after a checkpoint. A metric or variable that is not finite, or a
    variable whose norm explodes, ends it as diverged, and the last good checkpoint stays.

    Args:
        algorithm: what to run.
        federation: what to run it on; its ledger goes on counting.
        x0: initial upper variable.
        y0: initial lower variable.
        rounds: iterations (calls of `algorithm.round`).
        seed: of every random draw.
        evaluate: (state) -> metrics by name.
        every: evaluate after every so many iterations, before the first and after the last.
        directory: where to write `history.jsonl` and checkpoints; nothing is written by default.
        config: goes into the history's header.
        on_round: called after every iteration with its number and, where evaluated, the record.
        resume: go on with the run in `directory`, where there is one.
        checkpoint_seconds: how much time may pass between checkpoints.
        explosion: how many times its first norm (or 1, if that is larger) x, y or v may reach.

    Returns:
        The history; `.state` is the last state.

    Example:
        >>> from simfbo import SimulatedFederation, Steps, run, simfbo
        >>> from simfbo.tasks import quadratic
        >>> task = quadratic()
        >>> history = run(
        ...     simfbo(task.problem, Steps(y=0.2, v=0.2, x=0.1)),
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
    if rounds < 1 or every < 1:
        raise UserError(f"rounds and every must be at least 1, got {rounds} and {every}.")
    first_state = algorithm.init(x0, y0)
    header = {
        "algorithm": algorithm.name,
        "rounds": rounds,
        "every": every,
        "seed": seed,
        "config": dict(config or {}),
        "versions": versions(),
    }
    folder = None if directory is None else Path(directory)
    if folder is not None:
        _require_arrays(algorithm.name, first_state)
    journal = Journal(folder, header, checkpoint_seconds)
    first = Progress(-1, first_state, copy.deepcopy(federation.ledger))
    limits = explosion * np.maximum(1.0, _norms(_variables(first.state)))
    job = _Job(algorithm, federation, evaluate, on_round, rounds, every, journal, limits)
    try:
        return _go(job, journal.resume(first) if resume else journal.begin(first), seed)
    finally:
        journal.close()


def _require_arrays(name: str, state: Any) -> None:
    """Raise unless a state can be saved, before a long run finds out."""
    for leaf in jax.tree.leaves(state):
        plain = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        if not plain or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            kind = "random key" if plain else type(leaf).__name__
            raise UserError(
                f"The state of {name} holds a {kind}: keep arrays in it (of a key, its key_data), "
                "so that it can be saved."
            )


class _Job(NamedTuple):
    """What stays the same over a run."""

    algorithm: Algorithm
    federation: Federation
    evaluate: Evaluate | None
    on_round: OnRound | None
    rounds: int
    every: int
    journal: Journal
    limits: np.ndarray


class _Diverged(Exception):
    """A variable or metric left all bounds; carries the end of the history."""


def _go(job: _Job, at: Progress, seed: int) -> History:
    """Return the history, after all iterations that are left."""
    journal, root, fold = job.journal, jax.random.key(seed), jax.jit(jax.random.fold_in)
    job.federation.ledger.total = at.ledger.total
    job.federation.ledger.by_work = dict(at.ledger.by_work)
    _refused(job, 0)
    try:
        for t in range(at.round + 1, job.rounds + 1):
            at, record = _advance(job, at, t, fold(root, t))
            if job.on_round is not None:
                job.on_round(t, record)
            journal.save_when_due(at)
        end: dict[str, Any] = {"status": "finished"}
        journal.save(at)
    except KeyboardInterrupt:
        end = {"status": "interrupted"}
        journal.rewind(at)
        journal.save(at)
        # A second Ctrl-C leaves this last look out.
        with contextlib.suppress(KeyboardInterrupt):
            _look(job, at)
    except TooFewReplies as error:
        end = _starved(error, at.round + 1)
        if end["status"] == "starved":
            journal.save(at)
        journal.add("refusal", *_refused(job, at.round + 1))
        _look(job, at)
    except _Diverged as error:
        at, end = error.args
        _look(job, at)
    journal.history.state = at.state
    return journal.end(end)


def _advance(job: _Job, at: Progress, t: int, key: jax.Array) -> tuple[Progress, dict | None]:
    """Return the progress after iteration t and its record, if due; t = 0 only looks.

    It is complete only when all its lines are written: an interruption before that leaves the
    progress before it.
    """
    begin, due = _clocks(), t % job.every == 0 or t == job.rounds
    state = job.algorithm.round(at.state, job.federation, key) if t else at.state
    norms = _norms(_variables(state))
    wall, cpu = _clocks()
    refusals = _refused(job, t)
    after = Progress(
        t,
        state,
        copy.deepcopy(job.federation.ledger),
        at.refused + len(refusals),
        at.seconds + wall - begin[0],
        at.cpu_seconds + cpu - begin[1],
        job.journal.add("refusal", *refusals),
    )
    if end := _exploded(job, after, norms):
        raise _Diverged(after, end)
    record = _record(job, after) if due else None
    if record is not None:
        after = after._replace(written=job.journal.add("record", record))
        if end := _not_finite(record):
            raise _Diverged(after, end)
    return after, record


def _refused(job: _Job, t: int) -> list[dict[str, Any]]:
    """Return the refusals of iteration t, and take them from the federation's list."""
    waiting = getattr(job.federation, "refusals", [])
    refusals = [{"round": t, **refusal._asdict()} for refusal in waiting]
    waiting.clear()
    return refusals


def _look(job: _Job, at: Progress) -> None:
    """Add a last record, if there is none of this iteration yet."""
    records = job.journal.history.records
    if at.round >= 0 and (not records or records[-1]["round"] < at.round):
        job.journal.add("record", _record(job, at))


def _record(job: _Job, at: Progress) -> dict[str, Any]:
    """Return one line of the history."""
    sent = at.ledger.total._asdict()
    metrics = job.evaluate(at.state) if job.evaluate else {}
    return {
        "round": at.round,
        "communication_rounds": sent.pop("rounds"),
        **sent,
        "refused": at.refused,
        "seconds": round(at.seconds, 6),
        "cpu_seconds": round(at.cpu_seconds, 6),
        **({"projected": int(at.state.projected)} if hasattr(at.state, "projected") else {}),
        **{name: float(value) for name, value in metrics.items()},
    }


def _clocks() -> tuple[float, float]:
    """Return wall-clock and processor seconds, all threads of this process together."""
    return time.perf_counter(), time.process_time()


def _variables(state: Any) -> dict[str, PyTree]:
    """Return the variables of a state, by name."""
    return {name: getattr(state, name) for name in ("x", "y", "v") if hasattr(state, name)}


def _norms(variables: dict[str, PyTree]) -> np.ndarray:
    """Return the norm of each variable, in the same order."""
    return np.asarray(_norms_of(tuple(variables.values())), float)


@jax.jit
def _norms_of(variables: tuple[PyTree, ...]) -> jax.Array:
    return jnp.stack([jnp.sqrt(trees.squared_norm(tree)) for tree in variables])


def _exploded(job: _Job, at: Progress, norms: np.ndarray) -> dict[str, Any] | None:
    """Return the end of a run whose variable is not finite or too large; None where all is well."""
    for name, norm, limit in zip(_variables(at.state), norms, job.limits, strict=True):
        if not norm <= limit:
            latest = getattr(job.federation, "latest", None)
            client = None if latest is None else latest.loudest
            reason = (
                f"the norm of {name} is {norm:.3g} after round {at.round}, the limit {limit:.3g}; "
                f"client {client} sent the largest message. Smaller steps for {name} often help"
            )
            known = {"round": at.round, "variable": name, "client": client}
            return {"status": "diverged", **known, "reason": reason}
    return None


def _not_finite(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the end of a run with a metric that is not finite; None where all are."""
    for name, value in record.items():
        if not math.isfinite(value):
            reason = f"{name} is not finite after round {record['round']}. Smaller steps often help"
            known = {"round": record["round"], "variable": name}
            return {"status": "diverged", **known, "reason": reason}
    return None


def _starved(error: TooFewReplies, t: int) -> dict[str, Any]:
    """Return the end of a run with too few replies left.

    Where most of those left out were too large or not finite, that is divergence, not absence.
    """
    exchange = error.exchange
    diverged = exchange.wild
    left_out = ~exchange.admitted & ((exchange.squares.sum(1) != 0) | (not diverged))
    client = int(exchange.asked.ids[np.argmax(left_out)])
    advice = "Smaller steps often help" if diverged else "Ask more clients, or accept fewer replies"
    status = "diverged" if diverged else "starved"
    return {"status": status, "round": t, "client": client, "reason": f"{error}. {advice}"}
