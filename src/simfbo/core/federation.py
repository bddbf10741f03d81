"""The federation: one verb, a sum over a cohort. Each use of it is one communication round."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, final

import jax
import numpy as np

from simfbo.core.data import ClientData
from simfbo.core.exchange import Exchange, Refusal
from simfbo.core.ledger import Ledger
from simfbo.core.local_work import LocalPlan
from simfbo.core.problem import Point, PyTree
from simfbo.core.sampling import Cohort
from simfbo.errors import UserError


class Client(NamedTuple):
    """All that a client step may see besides the payload.

    Attributes:
        data: the client's lower and upper data.
        plan: how many local steps it takes and how they count.
        eta: its step sizes for x, y and v, as the algorithm gave them to the federation.
        key: its random key for this exchange.
        memory: what it kept when it last took part (`WithMemory`), or `Algorithm.memory`; None for
            an algorithm without one.
    """

    data: ClientData
    plan: LocalPlan
    eta: Point[PyTree]
    key: jax.Array
    memory: PyTree = None


class WithMemory(NamedTuple):
    """What a client step returns if the client is to remember something.

    The memory stays with the client: it is never sent. A client whose reply does not count keeps
    the one it had.

    Attributes:
        message: what is sent to the server.
        memory: what the client keeps, shaped as `Algorithm.memory` says.
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


class Hosted(NamedTuple):
    """The rounds of an algorithm that does a part of its work on the host, now and then.

    Its `Algorithm.round` is `prepare`, `round` and, where it is due, `finish`.

    Attributes:
        ahead: (state) -> how many rounds may follow before `finish` is due; 0: it is due now.
        prepare: (state, federation, key) -> state, before a round, on the host.
        round: (state, federation, key) -> state, what can be traced.
        finish: (state, federation, key) -> state, after a round, on the host.
    """

    ahead: Callable[[Any], int]
    prepare: Callable[[Any, "Federation", jax.Array], Any]
    round: Callable[[Any, "Federation", jax.Array], Any]
    finish: Callable[[Any, "Federation", jax.Array], Any]


class Tracing(NamedTuple):
    """How an algorithm's rounds are compiled.

    Attributes:
        whole: the `Algorithm.round` that this is about; where that was replaced, it is void.
        form: what the algorithm was built with except its step sizes: those of one form share
            compiled programs. None: it shares them with nobody.
        numbers: its step sizes.
        remake: (step sizes) -> the algorithm with these, which may be traced.
        hosted: the parts of a round, for an algorithm that does some of its work on the host.
    """

    whole: Callable[..., Any]
    form: Any = None
    numbers: PyTree = ()
    remake: Callable[[PyTree], "Algorithm"] | None = None
    hosted: Hosted | None = None


class Algorithm(NamedTuple):
    """An algorithm: pure functions of a state and a federation.

    Attributes:
        name: as people call it.
        init: (x0, y0) -> state; a state has at least the fields x and y.
        round: (state, federation, key) -> state, one iteration.
        client_steps: every client step that `round` hands to the federation.
        known_violations: laws of `simfbo.checks` that it breaks by construction, each with the
            reason.
        residuals: the channels of a client step's sums that vanish at the solution, by its name, as
            in `{"simfbo_step": "xyv"}`; a run's verdict is drawn from them.
        settings: what it was built with, by name. A run is resumed only with the same numbers
            (`simfbo.algorithms.with_settings` fills this and the next in).
        tracing: how `round` is compiled; by default it is traced as it is.
        memory: (x0, y0) -> what every client remembers before it first takes part, for methods
            whose client steps return `WithMemory`; None for those whose clients forget.
        exact_sums: whether the server must receive what clients sent, once and unchanged, because
            it keeps account of what they remember: no aggregator, lossy codec, momenta, clipping
            or sampling with replacement then.
        own_y: (memory) -> y_i, for methods whose clients have a lower variable of their own there;
            None where y is the state's. Evaluations on clients use it.
        judged: (state) -> what evaluations on clients get as x and y; the state's own by default.
        evidence: (state) -> what the algorithm measured of its own convergence, for the verdict
            (`simfbo.algorithms.Evidence`); None where it measures nothing.
    """

    name: str
    init: Callable[[PyTree, PyTree], Any]
    round: Callable[[Any, "Federation", jax.Array], Any]
    client_steps: tuple[ClientStep, ...]
    known_violations: Mapping[str, str] = {}
    residuals: Mapping[str, str] = {}
    settings: Mapping[str, Any] = {}
    tracing: Tracing | None = None
    memory: Callable[[PyTree, PyTree], PyTree] | None = None
    exact_sums: bool = False
    own_y: Callable[[PyTree], PyTree] | None = None
    judged: Callable[[Any], Point[PyTree]] | None = None
    evidence: Callable[[Any], dict[str, float] | None] | None = None

    @property
    def traced(self) -> Tracing:
        """Return how `round` is compiled."""
        if self.tracing is not None and self.tracing.whole is self.round:
            return self.tracing
        return Tracing(self.round)

    @property
    def hosted(self) -> Hosted | None:
        """Return the parts of `round`, if it does some of its work on the host."""
        return self.traced.hosted


def require_exact_sums(algorithm: Algorithm, what: str) -> None:
    """Raise if an algorithm needs exact sums, which something makes impossible."""
    if algorithm.exact_sums:
        raise UserError(
            f"{algorithm.name} keeps account of what its clients remember, which {what} would "
            'falsify: leave that out, or use control="mean".'
        )


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
        self,
        client_step: ClientStep,
        payload: PyTree,
        cohort: Cohort,
        key: jax.Array,
        eta: Point[PyTree] = Point(),
    ) -> PyTree:
        """Sum w_i client_step(payload, client_i) over the cohort, in one communication round.

        Refused replies are left out, and the weights of the others are multiplied by the number of
        clients sampled over the number admitted.

        Args:
            client_step: what each client does.
            payload: what each client receives.
            cohort: the clients, and their weights.
            key: of the exchange.
            eta: the clients' step sizes. They are inputs of the compiled program, so other values
                do not compile it again.
        """
        ...

    def gather(
        self,
        client_step: ClientStep,
        payload: PyTree,
        cohort: Cohort,
        key: jax.Array,
        eta: Point[PyTree] = Point(),
    ) -> PyTree:
        """Stack the cohort's messages along a new first axis, in one communication round.

        Refused replies are zero, and the others are multiplied by the number of clients sampled
        over the number admitted. The arguments are those of `sum`; the cohort's weights are not
        used.
        """
        ...

    def mean_norm(self, key: jax.Array) -> float | None:
        """Return rho = sum_j p_j ||a_j||_1 of the exchange with this key; None where unknown."""
        ...


Verb = Callable[[ClientStep, PyTree, Cohort, jax.Array, Point[PyTree]], Any]


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

    def mean_norm(self, key: jax.Array) -> float | None:
        """Return rho where it is known."""
        return self._federation.mean_norm(key)

    def sum(
        self,
        client_step: ClientStep,
        payload: PyTree,
        cohort: Cohort,
        key: jax.Array,
        eta: Point[PyTree] = Point(),
    ) -> PyTree:
        """Return what the view's sum returns."""
        return self._sum(client_step, payload, cohort, key, eta)

    def gather(
        self,
        client_step: ClientStep,
        payload: PyTree,
        cohort: Cohort,
        key: jax.Array,
        eta: Point[PyTree] = Point(),
    ) -> PyTree:
        """Return what the view's gather returns."""
        return self._gather(client_step, payload, cohort, key, eta)
