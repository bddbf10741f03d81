"""A record of the history: what a run had sent and spent by then, and its metrics."""

from collections.abc import Mapping
from typing import Any

from simfbo.core.ledger import Ledger
from simfbo.core.problem import CHANNELS
from simfbo.errors import UserError, brief
from simfbo.runs.client_scores import is_column
from simfbo.runs.files import Json
from simfbo.runs.history import CHANNEL_BYTES
from simfbo.runs.run_log import Progress


def record_of(
    at: Progress,
    counters: Mapping[str, int],
    metrics: Any,
    columns: Mapping[str, float] | None = None,
) -> Json:
    """Return the record of an evaluation.

    Args:
        at: what was evaluated.
        counters: of the method, by name.
        metrics: what the server measured, by name.
        columns: what is said of the clients' metrics.
    """
    total = at.ledger.total
    return {
        "round": at.round,
        "communication_rounds": total.rounds,
        **dict(zip(total._fields[1:5], total[1:5], strict=True)),
        **({"bytes_uncertainty": round(total.uncertainty, 6)} if total.estimated else {}),
        **_by_channel(at.ledger),
        **_evaluation(at.ledger),
        "refused": at.refused,
        "seconds": round(at.seconds, 6),
        "cpu_seconds": round(at.cpu_seconds, 6),
        **counters,
        **_numbers(metrics),
        **(columns or {}),
    }


def _evaluation(ledger: Ledger) -> dict[str, int]:
    """Return the bytes of evaluations on clients, which no other number contains."""
    sent = ledger.evaluation
    return {"bytes_evaluation": sent.bytes_down + sent.bytes_up} if sent.rounds else {}


def _numbers(metrics: Any) -> dict[str, float]:
    """Return metrics as numbers by name."""
    if not isinstance(metrics, Mapping):
        kind = type(metrics).__name__
        raise UserError(
            f"evaluate must return numbers by name, such as {{'loss': 0.5}}, got {kind}."
        )
    if taken := [name for name in metrics if is_column(str(name))]:
        raise UserError(
            f"evaluate cannot return '{taken[0]}': names that begin with clients_ are those of "
            "client_metrics."
        )
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError):
        raise UserError(
            f"evaluate must return one number per name, got {brief(metrics)}."
        ) from None


def _by_channel(ledger: Ledger) -> dict[str, int]:
    """Return the bytes of x, y and v, and of what belongs to none of them where there is any."""
    sent = dict.fromkeys(CHANNELS, 0) | ledger.by_channel
    return {name: sent[key] for name in CHANNEL_BYTES if (key := name[6:]) in sent}
