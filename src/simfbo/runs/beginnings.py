"""What is checked and made before a run begins, or goes on."""

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.data import FederatedData
from simfbo.core.method import Method
from simfbo.core.problem import PyTree
from simfbo.errors import MissingExtra, UserError, brief
from simfbo.privacy import privacy_of, spent
from simfbo.runs.client_scores import Goals, columns_of
from simfbo.runs.files import Json
from simfbo.runs.history import versions
from simfbo.runs.replies import taken_refusals, taken_suspicions
from simfbo.runs.run_log import Progress

WEAK = 10.0  # an epsilon above which a private run warns
LISTED = 20  # clients whose numbers of samples are in the header


def header_of(
    algorithm: Method,
    federation: Any,
    rounds: int,
    every: int,
    seed: int,
    config: Json | None,
    about: Json | None,
) -> Json:
    """Return the header of a history; warn where privacy will be weak. Arguments as of `run`."""
    _warn_of_epsilon(algorithm, federation, rounds, config)
    return {
        "algorithm": algorithm.name,
        "rounds": rounds,
        "every": every,
        "seed": seed,
        "config": dict(config or {}),
        "about": dict(about or {}),
        "versions": versions(),
        **_data(algorithm, federation),
    }


def _data(algorithm: Method, federation: Any) -> Json:
    """Return how many samples clients have, or that messages are private."""
    if privacy_of(algorithm) is not None:
        return {"private": True}  # of counts, the guarantee says nothing
    found = _sample_counts(federation)
    return {"samples": {level: _spread(counts) for level, counts in found.items()}} if found else {}


def _sample_counts(federation: Any) -> Mapping[str, np.ndarray] | None:
    """Return every client's number of samples, by level; None if that is not known here."""
    data = getattr(federation, "data", None)
    if hasattr(federation, "sample_counts") or not isinstance(data, FederatedData):
        return getattr(federation, "sample_counts", None)
    lower, upper = data.lower, data.upper
    shared = lower.samples is upper.samples and np.array_equal(lower.rows, upper.rows)
    if shared and np.array_equal(lower.count, upper.count):
        return {"lower and upper": np.asarray(lower.count)}
    return {"lower": np.asarray(lower.count), "upper": np.asarray(upper.count)}


def _spread(counts: np.ndarray) -> Json:
    """Return a few numbers of some counts and, unless there are many, each of them."""
    found = {"clients": len(counts), "least": int(counts.min()), "most": int(counts.max()),
             "median": float(np.median(counts)), "total": int(counts.sum())}  # fmt: skip
    return found if len(counts) > LISTED else {**found, "each": counts.tolist()}


def with_clients(header: Json, goals: Goals) -> Json:
    """Return a header that says what clients measure, by name, and what of it should be large."""
    about = with_columns(header["about"], goals)
    return {**header, "about": about, "client_metrics": dict(goals)}


def with_columns(about: Json, goals: Goals) -> Json:
    """Return what is said of metrics, with those numbers of clients that should be large."""
    if "maximise" not in about:
        return about
    large = [name for metric in goals if goals[metric] == "max" for name in columns_of(metric)]
    return {**about, "maximise": [*about["maximise"], *large]}


def require_runnable(algorithm: Any, federation: Any) -> None:
    """Raise unless these are an algorithm and a federation."""
    method, clients = "simfbo.algorithms.simfbo(problem, steps)", "simfbo.SimulatedFederation(data)"
    for what, found, fits, example in (
        ("algorithm", algorithm, isinstance(algorithm, Method), method),
        ("federation", federation, hasattr(federation, "ledger"), clients),
    ):
        if not fits:
            kind = getattr(found, "__name__", type(found).__name__)
            raise UserError(f"The {what} of a run must be such as {example}, got '{kind}'.")


def _warn_of_epsilon(algorithm: Method, federation: Any, rounds: int, config: Json | None) -> None:
    """Warn before a private run starts if its guarantee will be weak at the end."""
    if privacy_of(algorithm) is None:
        return
    delta = ((config or {}).get("privacy") or {}).get("delta", 1e-5)
    with contextlib.suppress(MissingExtra):  # which the accountant needs, and the noise does not
        if (epsilon := spent(algorithm, federation, rounds, delta)) > WEAK:
            least = "at least " if algorithm.asks_again else ""  # measuring adds exchanges
            warnings.warn(
                f"This run ends at epsilon {least}{epsilon:.3g}, and above {WEAK:.0f} hardly "
                "anything is protected: add noise, run fewer iterations, or sample few of many "
                "clients.",
                stacklevel=4,
            )


def whole_numbers(rounds: Any, every: Any, seed: Any) -> tuple[int, int | None, int]:
    """Return `rounds`, `every`, which may be None, and `seed` as whole numbers."""
    every = None if every is None else _whole(every, "every", 1)
    return _whole(rounds, "rounds", 1), every, _whole(seed, "seed")


def _whole(value: Any, name: str, least: int | None = None) -> int:
    """Return a whole number of any type."""
    try:
        number = int(value)
        fits = number == value and (least is None or number >= least)
    except (TypeError, ValueError, OverflowError):
        number, fits = 0, False
    if not fits:
        limit = "" if least is None else f" of at least {least}"
        raise UserError(f"{name} must be a whole number{limit}, got {brief(value)}.")
    return number


def require_arrays(name: str, state: PyTree) -> None:
    """Raise before the run starts if its state cannot be saved."""
    for leaf in jax.tree.leaves(state):
        plain = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        if not plain or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            kind = "random key" if plain else type(leaf).__name__
            raise UserError(
                f"The state of {name} holds a {kind}, which cannot be saved: use arrays (for a "
                "random key, its key_data)."
            )


def first_memory(algorithm: Method, federation: Any, x0: PyTree, y0: PyTree) -> PyTree:
    """Let the clients forget earlier runs; return what they remember, if that is kept here."""
    if hasattr(federation, "remember"):
        federation.remember(algorithm, x0, y0)
        return federation.client_memory
    if algorithm.has_memory:
        raise UserError(
            f"The clients of {algorithm.name} remember, and this federation has no `remember`: use "
            "an engine of simfbo."
        )
    return None


def restored(federation: Any, at: Progress) -> Any:
    """Let a federation forget other runs, or an iteration that was interrupted; return it."""
    vars(federation.ledger).update(vars(at.ledger.copied()))
    taken_refusals(federation, 0)
    taken_suspicions(federation, 0)
    federation.observed, federation.client_memory = at.observed, at.client_memory
    return federation
