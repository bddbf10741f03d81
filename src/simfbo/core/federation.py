"""The federation: sums over a cohort, each of which is one communication round."""

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
    """The arguments of a client step besides the payload.

    Attributes:
        data: the client's lower and upper data.
        plan: its local work.
        key: its random key for this exchange.
        memory: the memory of its last admitted reply (`WithMemory`), initially
            `Method.client_memory`; None for a method with stateless clients.
    """

    data: ClientData
    plan: LocalPlan
    key: jax.Array
    memory: PyTree = None


class WithMemory(NamedTuple):
    """The result of a client step of a stateful client.

    The memory stays on the client and is never sent. If the reply is rejected, the client keeps its
    previous memory.

    Attributes:
        message: is sent to the server.
        memory: is stored on the client, in the shapes of `Method.client_memory`.
    """

    message: PyTree
    memory: PyTree


def message_of(reply: PyTree) -> PyTree:
    """Return the message in the result of a client step."""
    return reply.message if isinstance(reply, WithMemory) else reply


def with_message(reply: PyTree, message: PyTree) -> PyTree:
    """Replace the message in the result of a client step."""
    return reply._replace(message=message) if isinstance(reply, WithMemory) else message


ClientStep = Callable[[PyTree, Client], PyTree]
T = TypeVar("T")


class Federation(Protocol):
    """The interface of methods to clients: sample a cohort, sum or gather its messages.

    Attributes:
        secret: cohorts and noise are sampled from the operating system's entropy.
    """

    secret: bool

    @property
    def ledger(self) -> Ledger:
        """The traffic so far."""
        ...

    @property
    def refusals(self) -> list[Refusal]:
        """The replies rejected since the runner last removed them."""
        ...

    @property
    def latest(self) -> Exchange | None:
        """The outcome of the last exchange; None before the first."""
        ...

    @property
    def n(self) -> int:
        """The number of clients."""
        ...

    @property
    def p(self) -> np.ndarray:
        """The clients' weights p_i."""
        ...

    def cohort(self, key: jax.Array) -> Cohort:
        """Sample a cohort."""
        ...

    def sum(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Sum w_i client_step(payload, client_i) over the cohort, in one communication round.

        Rejected replies are left out, and the weights of the others are multiplied by the number of
        clients sampled over the number admitted.

        Args:
            client_step: of a `Method`, with its numbers as inputs of the compiled program, or a
                plain function, with numbers as constants.
            payload: is sent to each client.
            cohort: the clients, and their weights.
            key: of the exchange.
        """
        ...

    def gather(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Stack the cohort's messages along a new first axis, in one communication round.

        Rejected replies are zero, and the others are multiplied by the number of clients sampled
        over the number admitted. The arguments are those of `sum`; the cohort's weights are not
        used.
        """
        ...

    def when(self, condition: Any, branch: Callable[[], T], otherwise: T) -> T:
        """Run a branch with further exchanges if a condition holds, also in compiled rounds.

        Args:
            condition: a bool, which may be traced.
            branch: () -> the value, with exchanges of stateless clients.
            otherwise: the value without the branch, of the same shapes.
        """
        ...

    def mean_norm(self, key: jax.Array) -> float | None:
        """Return rho = sum_j p_j ||a_j||_1 of the exchange with this key; None if unknown."""
        ...


Verb = Callable[[ClientStep, PyTree, Cohort, jax.Array], Any]


@final
class View:
    """A federation with replaced `sum` and `gather`; all else is delegated."""

    def __init__(self, federation: Federation, sum: Verb, gather: Verb) -> None:
        """Create a view; the functions usually call `federation.sum` and `federation.gather`."""
        self._federation, self._sum, self._gather = federation, sum, gather
        self.secret: bool = getattr(federation, "secret", False)

    @property
    def ledger(self) -> Ledger:
        """The traffic so far."""
        return self._federation.ledger

    @property
    def refusals(self) -> list[Refusal]:
        """The replies rejected since the runner last removed them."""
        return getattr(self._federation, "refusals", [])

    @property
    def n(self) -> int:
        """The number of clients."""
        return self._federation.n

    @property
    def p(self) -> np.ndarray:
        """The clients' weights p_i."""
        return self._federation.p

    @property
    def latest(self) -> Exchange | None:
        """The outcome of the last exchange."""
        return self._federation.latest

    def cohort(self, key: jax.Array) -> Cohort:
        """Sample a cohort."""
        return self._federation.cohort(key)

    def when(self, condition: Any, branch: Callable[[], T], otherwise: T) -> T:
        """Run a branch if a condition holds."""
        return self._federation.when(condition, branch, otherwise)

    def mean_norm(self, key: jax.Array) -> float | None:
        """Return rho of the exchange with this key; None if unknown."""
        return self._federation.mean_norm(key)

    def sum(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Call the view's sum."""
        return self._sum(client_step, payload, cohort, key)

    def gather(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Call the view's gather."""
        return self._gather(client_step, payload, cohort, key)
