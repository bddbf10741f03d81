"""The set-up of a run: its checks, its header, and the state of a new or resumed federation."""

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
    """Return the header of a history; warn if privacy will be weak. Arguments as in `run`."""
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
    """Return statistics of the clients' sample counts; for private runs only that they are."""
    if privacy_of(algorithm) is not None:
        return {"private": True}  # the guarantee does not cover counts
    levels = _sample_counts(federation)
    if not levels:
        return {}
    return {"samples": {level: _statistics(counts) for level, counts in levels.items()}}


def _sample_counts(federation: Any) -> Mapping[str, np.ndarray] | None:
    """Return all clients' sample counts by level; None if the server does not know them."""
    data = getattr(federation, "data", None)
    if hasattr(federation, "sample_counts") or not isinstance(data, FederatedData):
        return getattr(federation, "sample_counts", None)
    lower, upper = data.lower, data.upper
    shared = lower.samples is upper.samples and np.array_equal(lower.rows, upper.rows)
    if shared and np.array_equal(lower.count, upper.count):
        return {"lower and upper": np.asarray(lower.count)}
    return {"lower": np.asarray(lower.count), "upper": np.asarray(upper.count)}


def _statistics(counts: np.ndarray) -> Json:
    statistics = {
        "clients": len(counts),
        "least": int(counts.min()),
        "most": int(counts.max()),
        "median": float(np.median(counts)),
        "total": int(counts.sum()),
    }
    return statistics if len(counts) > LISTED else {**statistics, "each": counts.tolist()}


def with_clients(header: Json, goals: Goals) -> Json:
    """Add the clients' metrics and their goals to a header."""
    about = with_columns(header["about"], goals)
    return {**header, "about": about, "client_metrics": dict(goals)}


def with_columns(about: Json, goals: Goals) -> Json:
    """Add the columns of clients' metrics with the goal "max" to `about["maximise"]`."""
    if "maximise" not in about:
        return about
    columns = [name for metric in goals if goals[metric] == "max" for name in columns_of(metric)]
    return {**about, "maximise": [*about["maximise"], *columns]}


def require_runnable(algorithm: Any, federation: Any) -> None:
    """Raise unless these are an algorithm and a federation."""
    method, clients = "simfbo.algorithms.simfbo(problem, steps)", "simfbo.SimulatedFederation(data)"
    for argument, value, valid, example in (
        ("algorithm", algorithm, isinstance(algorithm, Method), method),
        ("federation", federation, hasattr(federation, "ledger"), clients),
    ):
        if not valid:
            kind = getattr(value, "__name__", type(value).__name__)
            raise UserError(f"The {argument} of a run must be such as {example}, got '{kind}'.")


def _warn_of_epsilon(algorithm: Method, federation: Any, rounds: int, config: Json | None) -> None:
    """Warn if the privacy guarantee at the end of the run will be weak."""
    if privacy_of(algorithm) is None:
        return
    delta = ((config or {}).get("privacy") or {}).get("delta", 1e-5)
    with contextlib.suppress(MissingExtra):  # only the accountant needs the extra, not the noise
        if (epsilon := spent(algorithm, federation, rounds, delta)) > WEAK:
            bound = "at least " if algorithm.asks_again else ""  # measurements add exchanges
            warnings.warn(
                f"This run ends at epsilon {bound}{epsilon:.3g}, and above {WEAK:.0f} hardly "
                "anything is protected: add noise, run fewer iterations, or sample few of many "
                "clients.",
                stacklevel=4,
            )


def whole_numbers(rounds: Any, every: Any, seed: Any) -> tuple[int, int | None, int]:
    """Validate `rounds`, `every`, which may be None, and `seed`; convert them to int."""
    every = None if every is None else _integer(every, "every", 1)
    return _integer(rounds, "rounds", 1), every, _integer(seed, "seed")


def _integer(value: Any, name: str, minimum: int | None = None) -> int:
    """Convert a number of any type to int; raise unless it is integral and large enough."""
    try:
        number = int(value)
        valid = number == value and (minimum is None or number >= minimum)
    except (TypeError, ValueError, OverflowError):
        number, valid = 0, False
    if not valid:
        limit = "" if minimum is None else f" of at least {minimum}"
        raise UserError(f"{name} must be a whole number{limit}, got {brief(value)}.")
    return number


def require_arrays(name: str, state: PyTree) -> None:
    """Raise if a state has leaves that cannot be saved in a checkpoint."""
    for leaf in jax.tree.leaves(state):
        is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        if not is_array or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            kind = "random key" if is_array else type(leaf).__name__
            raise UserError(
                f"The state of {name} holds a {kind}, which cannot be saved: use arrays (for a "
                "random key, its key_data)."
            )


def first_memory(algorithm: Method, federation: Any, x0: PyTree, y0: PyTree) -> PyTree:
    """Reset the clients' memory; return it if the federation holds it in this process."""
    if hasattr(federation, "remember"):
        federation.remember(algorithm, x0, y0)
        return federation.client_memory
    if algorithm.has_memory:
        raise UserError(
            f"The clients of {algorithm.name} are stateful, and this federation has no `remember`: "
            "use an engine of simfbo."
        )
    return None


def restored(federation: Any, at: Progress) -> Any:
    """Reset a federation, which is returned, to the state of a run's progress."""
    vars(federation.ledger).update(vars(at.ledger.copied()))
    taken_refusals(federation, 0)
    taken_suspicions(federation, 0)
    federation.observed, federation.client_memory = at.observed, at.client_memory
    return federation
