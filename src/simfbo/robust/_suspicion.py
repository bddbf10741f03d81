"""Suspicions about clients, and their texts."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["few", "refused", "opposed", "same", "forgot", "not-finite"]


class Suspicion(NamedTuple):
    """Clients whose messages stood out in most of the recent exchanges.

    Attributes:
        kind: "few": they carry most of the sum; "refused": rejected for their size; "opposed":
            against the others; "same": equal messages; "forgot": client memory is missing;
            "not-finite".
        exchange: the number of the exchange in which the evidence was sufficient.
        client_step: the name of its client step.
        clients: their numbers.
        share: their share of the sum of norms in that exchange.
        text: the warning.
    """

    kind: Kind
    exchange: int
    client_step: str
    clients: list[int]
    share: float
    text: str


def text_of(kind: Kind, clients: Sequence[int], share: float) -> str:
    """Return the text of a suspicion."""
    single = len(clients) == 1
    names = f"client{'' if single else 's'} {_list(clients)}"
    if kind == "few":
        what = f"send{'s' * single} {100 * share:.0f} % of the norm"
        return f"{names} {what}: use an aggregator or a gate limit"
    if kind == "refused":
        what = f"exceed{'s' * single} the gate's limit in most exchanges"
        return f"{names} {what}: they may be hostile, or the limit too small"
    if kind == "not-finite":
        what = "a message that is" if single else "messages that are"
        return (
            f"{names} sent {what} not finite and not counted: if {'its' if single else 'their'} "
            "data hold NaN or infinite numbers, clean or drop those rows"
        )
    if kind == "same":
        return f"{names} send the same messages: they may be copies, or work together"
    return (
        f"{names} point{'s' * single} against other clients in most exchanges: one of them may be "
        "hostile, or their data contradict each other"
    )


def _list(clients: Sequence[int]) -> str:
    """List clients, the first eight by number."""
    shown, others = ", ".join(map(str, clients[:8])), len(clients) - 8
    return f"{shown} and {others} more" if others > 0 else shown
