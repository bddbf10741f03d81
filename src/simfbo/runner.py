"""The one runner: any algorithm on any federation."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from simfbo.errors import UserError
from simfbo.federation import Algorithm, Federation
from simfbo.history import History, Writer, versions
from simfbo.problem import PyTree

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
) -> History:
    """Return the history of `rounds` iterations of an algorithm.

    Ctrl-C ends the run cleanly: the history says so and holds everything up to then. A metric that
    is not finite, or such an x or y, ends it as diverged.

    Args:
        algorithm: what to run.
        federation: what to run it on; its ledger goes on counting.
        x0: initial upper variable.
        y0: initial lower variable.
        rounds: iterations (calls of `algorithm.round`).
        seed: of every random draw.
        evaluate: (state) -> metrics by name.
        every: evaluate after every so many iterations, before the first and after the last.
        directory: where to write `history.jsonl`; nothing is written by default.
        config: goes into the history's header.
        on_round: called after every iteration with its number and, where evaluated, the record.

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
    header = {
        "algorithm": algorithm.name,
        "rounds": rounds,
        "seed": seed,
        "config": dict(config or {}),
        "versions": versions(),
    }
    writer = Writer(None if directory is None else Path(directory))
    history = History(header)
    writer.write("header", header)
    try:
        status = _loop(algorithm, federation, x0, y0, history, writer, evaluate, every, on_round)
        history.end = {"status": status}
        writer.write("end", history.end)
    finally:
        writer.close()
    return history


def _loop(
    algorithm: Algorithm,
    federation: Federation,
    x0: PyTree,
    y0: PyTree,
    history: History,
    writer: Writer,
    evaluate: Evaluate | None,
    every: int,
    on_round: OnRound | None,
) -> str:
    """Return how the run ended, after filling the history."""
    rounds, root = history.header["rounds"], jax.random.key(history.header["seed"])
    fold = jax.jit(jax.random.fold_in)
    history.state, done, spent = algorithm.init(x0, y0), 0, (0.0, 0.0)

    def look() -> dict[str, Any]:
        record = _record(done, federation, spent, evaluate, history.state)
        history.records.append(record)
        writer.write("record", record)
        return record

    try:
        for t in range(rounds + 1):
            begin, due = _clocks(), t % every == 0 or t == rounds
            if t:
                history.state = algorithm.round(history.state, federation, fold(root, t))
            if due:
                jax.block_until_ready(history.state)
            wall, cpu = _clocks()
            done, spent = t, (spent[0] + wall - begin[0], spent[1] + cpu - begin[1])
            record = look() if due else None
            if record and _diverged(record, history.state):
                return "diverged"
            if on_round is not None:
                on_round(t, record)
    except KeyboardInterrupt:
        # A second Ctrl-C leaves this last look out.
        with contextlib.suppress(KeyboardInterrupt):
            if not history.records or history.records[-1]["round"] < done:
                look()
        return "interrupted"
    return "finished"


def _record(
    t: int,
    federation: Federation,
    spent: tuple[float, float],
    evaluate: Evaluate | None,
    state: Any,
) -> dict[str, Any]:
    """Return one line of the history."""
    sent = federation.ledger.total._asdict()
    metrics = evaluate(state) if evaluate else {}
    return {
        "round": t,
        "communication_rounds": sent.pop("rounds"),
        **sent,
        "seconds": round(spent[0], 6),
        "cpu_seconds": round(spent[1], 6),
        **({"projected": int(state.projected)} if hasattr(state, "projected") else {}),
        **{name: float(value) for name, value in metrics.items()},
    }


def _clocks() -> tuple[float, float]:
    """Return wall-clock and processor seconds, all threads of this process together."""
    return time.perf_counter(), time.process_time()


def _diverged(record: dict[str, Any], state: Any) -> bool:
    """Return whether a number of the record, or x or y, is not finite."""
    leaves = jax.tree.leaves((state.x, state.y))
    finite = all(map(math.isfinite, record.values()))
    return not finite or not all(bool(jnp.isfinite(leaf).all()) for leaf in leaves)
