"""The federation: one verb, a sum over a cohort. Each use of it is one communication round."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar, final

import jax
import numpy as np

from simfbo.core.data import ClientData
from simfbo.core.exchange import Exchange, Refusal
from simfbo.core.ledger import Ledger
from simfbo.core.local_work import LocalPlan
from simfbo.core.problem import PyTree
from simfbo.core.sampling import Cohort


class Client(NamedTuple):
    """All that a client step may see besides the payload.

    Attributes:
        data: the client's lower and upper data.
        plan: how many local steps it takes and how they count.
        key: its random key for this exchange.
        memory: what it kept when it last took part (`WithMemory`), at first
            `Method.client_memory`; None for a method with stateless clients.
    """

    data: ClientData
    plan: LocalPlan
    key: jax.Array
    memory: PyTree = None


class WithMemory(NamedTuple):
    """What a client step returns if the client is to remember something.

    The memory stays with the client: it is never sent. A client whose reply does not count keeps
    the one it had.

    Attributes:
        message: what is sent to the server.
        memory: what the client keeps, shaped as `Method.client_memory`.
    """

    message: PyTree
    memory: PyTree


def message_of(reply: PyTree) -> PyTree:
    """Return the message in what a client step returned."""
    return reply.message if isinstance(reply, WithMemory) else reply


def with_message(reply: PyTree, message: PyTree) -> PyTree:
    """Return what a client step returned, with another message."""
    return reply._replace(message=message) if isinstance(reply, WithMemory) else message


ClientStep = Callable[[PyTree, Client], PyTree]
T = TypeVar("T")


class Federation(Protocol):
    """What an algorithm can do with its clients: sample a cohort, sum or gather its messages.

    Attributes:
        secret: whether cohorts and noise come from randomness that nobody can reproduce.
    """

    secret: bool

    @property
    def ledger(self) -> Ledger:
        """Return what was sent so far."""
        ...

    @property
    def refusals(self) -> list[Refusal]:
        """Return the replies refused since the runner last took them."""
        ...

    @property
    def latest(self) -> Exchange | None:
        """Return the outcome of the last exchange; None before the first."""
        ...

    @property
    def n(self) -> int:
        """Return the number of clients."""
        ...

    @property
    def p(self) -> np.ndarray:
        """Return the clients' weights p_i."""
        ...

    def cohort(self, key: jax.Array) -> Cohort:
        """Sample the clients that take part."""
        ...

    def sum(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Sum w_i client_step(payload, client_i) over the cohort, in one communication round.

        Refused replies are left out, and the weights of the others are multiplied by the number of
        clients sampled over the number admitted.

        Args:
            client_step: what each client does: a client step of a `Method`, whose numbers are
                inputs of the compiled program, or a plain function, compiled as it is.
            payload: what each client receives.
            cohort: the clients, and their weights.
            key: of the exchange.
        """
        ...

    def gather(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Stack the cohort's messages along a new first axis, in one communication round.

        Refused replies are zero, and the others are multiplied by the number of clients sampled
        over the number admitted. The arguments are those of `sum`; the cohort's weights are not
        used.
        """
        ...

    def when(self, condition: Any, branch: Callable[[], T], otherwise: T) -> T:
        """Run a branch with exchanges of its own if a condition holds, also in compiled rounds.

        Args:
            condition: a bool, which may be traced.
            branch: () -> the value, by exchanges with this federation. Its clients are stateless.
            otherwise: the value without the branch, of the same shapes.
        """
        ...

    def mean_norm(self, key: jax.Array) -> float | None:
        """Return rho = sum_j p_j ||a_j||_1 of the exchange with this key; None where unknown."""
        ...


Verb = Callable[[ClientStep, PyTree, Cohort, jax.Array], Any]


@final
class View:
    """A federation whose `sum` and `gather` are other functions; all else is the federation's."""

    def __init__(self, federation: Federation, sum: Verb, gather: Verb) -> None:
        """Take the federation and the two functions, which usually call the federation's own."""
        self._federation, self._sum, self._gather = federation, sum, gather
        self.secret: bool = getattr(federation, "secret", False)

    @property
    def ledger(self) -> Ledger:
        """Return what was sent so far."""
        return self._federation.ledger

    @property
    def refusals(self) -> list[Refusal]:
        """Return the replies refused since the runner last took them."""
        return getattr(self._federation, "refusals", [])

    @property
    def n(self) -> int:
        """Return the number of clients."""
        return self._federation.n

    @property
    def p(self) -> np.ndarray:
        """Return the clients' weights p_i."""
        return self._federation.p

    @property
    def latest(self) -> Exchange | None:
        """Return the outcome of the last exchange."""
        return self._federation.latest

    def cohort(self, key: jax.Array) -> Cohort:
        """Sample the clients that take part."""
        return self._federation.cohort(key)

    def when(self, condition: Any, branch: Callable[[], T], otherwise: T) -> T:
        """Run a branch if a condition holds."""
        return self._federation.when(condition, branch, otherwise)

    def mean_norm(self, key: jax.Array) -> float | None:
        """Return rho where it is known."""
        return self._federation.mean_norm(key)

    def sum(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Return what the view's sum returns."""
        return self._sum(client_step, payload, cohort, key)

    def gather(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Return what the view's gather returns."""
        return self._gather(client_step, payload, cohort, key)
