"""The errors a user can meet."""

from typing import Any


class UserError(Exception):
    """Something the user can put right: one sentence that says what to do."""


class ClientError(RuntimeError):
    """A client's work failed; the message names the client and its work."""


class TooFewReplies(RuntimeError):
    """Fewer replies passed the gate than an exchange needs.

    Attributes:
        exchange: what came of it, the refusals among it.
    """

    def __init__(self, left: int, exchange: Any) -> None:
        """Say how many are left, who was refused first and why."""
        self.exchange = exchange
        asked = exchange.asked
        why = "".join(f": client {one.client} {one.reason}" for one in exchange.refusals[:1])
        super().__init__(f"only {left} of {len(asked.ids)} replies to '{asked.work}' count{why}")
