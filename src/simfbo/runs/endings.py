"""Reasons to end a run before its last round: divergence, or too few usable replies."""

import math
from collections.abc import Sequence

import numpy as np

from simfbo.core.exchange import Exchange, Reason
from simfbo.errors import TooFewReplies
from simfbo.runs.files import Json

_SMALLER = "Smaller step sizes often help"
_INPUTS = "Look for NaN in the clients' data, x0 and y0"


def exploded(
    names: Sequence[str],
    norms: Sequence[float],
    sizes: Sequence[float],
    explosion: float,
    t: int,
    latest: Exchange | None,
) -> Json | None:
    """Return an end record if a variable is not finite or too large; None otherwise.

    Args:
        names: of the variables.
        norms: of the variables after round t.
        sizes: their initial norms.
        explosion: the largest norm allowed in round t, in units of t^2 times the initial one.
        t: the round.
        latest: the outcome of the last exchange.
    """
    for name, norm, size in zip(names, norms, sizes, strict=True):
        limit = explosion * max(1, t) ** 2 * size
        if not norm <= limit:
            client = None if latest is None else latest.largest_sender
            reason = (
                f"the norm of {name} is {norm:.3g} after iteration {t}, the limit {limit:.3g}; "
                f"client {client} sent the largest message. A smaller step size for {name} often "
                "helps"
            )
            return {
                "status": "diverged",
                "round": t,
                "variable": name,
                "client": client,
                "reason": reason,
            }
    return None


def not_finite(record: Json) -> Json | None:
    """Return an end record if a metric is not finite; None otherwise."""
    for name, value in record.items():
        if not math.isfinite(value):
            advice = _SMALLER if record["round"] else _INPUTS
            t = record["round"]
            reason = f"{name} is not finite after iteration {t}. {advice}"
            return {"status": "diverged", "round": t, "variable": name, "reason": reason}
    return None


def starved(error: TooFewReplies, t: int) -> Json:
    """Return the end record of a run that received too few usable replies.

    The run diverged if most rejected replies were too large or not finite; otherwise it starved.
    """
    exchange = error.exchange
    diverged = exchange.mostly_oversized
    rejected = ~exchange.admitted & ((exchange.squares.sum(1) != 0) | (not diverged))
    client = int(exchange.request.ids[np.argmax(rejected)])
    advice = _SMALLER if diverged else "Sample more clients, or lower min_replies"
    reasons = [refusal.reason for refusal in exchange.refusals]
    if diverged and t == 1 and all(reason == Reason.NOT_FINITE for reason in reasons):
        advice = _INPUTS
    status = "diverged" if diverged else "starved"
    return {"status": status, "round": t, "client": client, "reason": f"{error}. {advice}"}
