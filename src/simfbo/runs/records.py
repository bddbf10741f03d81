"""A record of the history: what a run had sent and spent by then, and its metrics."""

from collections.abc import Mapping

from simfbo.core.aggregation import CHANNELS
from simfbo.core.ledger import Ledger
from simfbo.runs.files import Json
from simfbo.runs.history import CHANNEL_BYTES
from simfbo.runs.run_log import Progress


def record_of(at: Progress, metrics: Mapping[str, float]) -> Json:
    """Return the record of an evaluation."""
    total = at.ledger.total
    return {
        "round": at.round,
        "communication_rounds": total.rounds,
        **dict(zip(total._fields[1:5], total[1:5], strict=True)),
        **({"bytes_uncertainty": round(total.uncertainty, 6)} if total.estimated else {}),
        **_by_channel(at.ledger),
        "refused": at.refused,
        "seconds": round(at.seconds, 6),
        "cpu_seconds": round(at.cpu_seconds, 6),
        **({"projected": int(at.state.projected)} if hasattr(at.state, "projected") else {}),
        **{name: float(value) for name, value in metrics.items()},
    }


def _by_channel(ledger: Ledger) -> dict[str, int]:
    """Return the bytes of x, y and v, and of what belongs to none of them where there is any."""
    sent = dict.fromkeys(CHANNELS, 0) | ledger.by_channel
    return {name: sent[key] for name in CHANNEL_BYTES if (key := name[6:]) in sent}
