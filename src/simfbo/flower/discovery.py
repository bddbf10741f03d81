"""The nodes of the clients: nodes report them when they come online and after failures."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from simfbo.errors import UserError
from simfbo.flower.transport import HELLO, Envelope, Package, Response, Transport

LOG = logging.getLogger("simfbo")
_RETRY = 5.0  # seconds until an unusable node is asked again


class _Unusable(Exception):
    """A node that cannot be used; the text completes "it ..." with the reason."""


class Discovery:
    """The nodes of a federation and their clients.

    Attributes:
        holders: the node of every client that has one.
        samples: the number of samples of every client, as its node reports it.

    Once the run has started, a client belongs to its node at that time. If that node is away, only
    a node that was not there at the start may replace it, such as the same one under a new number,
    until it is back.
    """

    def __init__(self, transport: Transport, n: int, timeout: float) -> None:
        """Take the transport, the number of clients and the timeout of replies in seconds."""
        self.holders: dict[int, int] = {}
        self.samples: dict[int, int] = {}
        self._homes: dict[int, int] | None = None  # holders at the start of the run
        self._transport, self._n, self._timeout = transport, n, timeout
        self._hellos: dict[int, str | None] = {}  # by node; None once it has replied
        self._problems: dict[int, str] = {}  # reasons why nodes could not be used
        self._retries: dict[int, float] = {}  # times of the next attempts

    @property
    def missing(self) -> list[int]:
        """The clients without a node."""
        return [i for i in range(self._n) if i not in self.holders]

    @property
    def problem(self) -> str | None:
        """The latest reason why a node could not be used."""
        return next(reversed(self._problems.values()), None)

    @property
    def waiting(self) -> dict[str, int]:
        """The nodes that have not replied yet, by the number of the envelope."""
        return {number: node for node, number in self._hellos.items() if number}

    def close(self) -> None:
        """Start the run: from now on, reports of other nodes' clients are ignored.

        Before, two nodes with the same client are an error.
        """
        self._homes = dict(self.holders)

    def reported_weights(self) -> list[float]:
        """Return the clients' numbers of samples; warn if one node has most of them."""
        counts = [float(self.samples.get(i, 0)) for i in range(self._n)]
        totals: dict[int, float] = {}
        for client, node in self.holders.items():
            totals[node] = totals.get(node, 0.0) + counts[client]
        node, most = max(totals.items(), key=lambda pair: pair[1])
        if len(totals) > 2 and most > 0.5 * sum(counts):
            share = f"{100 * most / sum(counts):.0f} %"
            LOG.warning(
                "Node %s reports %s of all samples, and its clients get that share of the weight: "
                "set p in the deployment if it should not.",
                node,
                share,
            )
        return counts

    def ask(self, online: set[int]) -> None:
        """Ask new and returning nodes for their clients."""
        self._hellos = {node: number for node, number in self._hellos.items() if node in online}
        now, unknown = time.monotonic(), sorted(online - self._hellos.keys())
        due = [node for node in unknown if self._retries.get(node, now) <= now]
        if due:
            hellos = [Envelope(node, HELLO, Package({}, {})) for node in due]
            sent = zip(due, self._transport.send(hellos, self._timeout), strict=True)
            self._hellos |= {node: number for node, number in sent if number}

    def ask_again(self, node: int) -> None:
        """Ask a node again, since its clients may have changed."""
        self._hellos.pop(node, None)

    def register(self, node: int, response: Response) -> None:
        """Record the clients that a node reports."""
        try:
            samples_by_client = _reported(response, self._n)
            self._require_free(node, samples_by_client)
        except _Unusable as error:
            LOG.warning("Node %s cannot be used yet: it %s.", node, error)
            self._problems[node] = str(error)
            self._retries[node] = time.monotonic() + _RETRY
            self.ask_again(node)
            return
        self._hellos[node] = None
        self.holders = {i: holder for i, holder in self.holders.items() if holder != node}
        self.holders |= dict.fromkeys(samples_by_client, node)
        self.samples |= samples_by_client
        if self._homes is not None:
            self._homes = dict.fromkeys(samples_by_client, node) | self._homes

    def _require_free(self, node: int, clients: Iterable[int]) -> None:
        """Raise if another node holds one of the clients."""
        others = self._transport.nodes() - {node}
        for client in clients:
            holder = self.holders.get(client)
            if self._homes is not None:
                self._require_own(node, client, taken=holder in others)
            elif holder in others:
                raise UserError(
                    f"Two nodes hold client {client} (nodes {holder} and {node}): give every node "
                    "its own clients (--node-config)."
                )

    def _require_own(self, node: int, client: int, taken: bool) -> None:
        """Raise if, during a run, a node reports another node's client."""
        homes = self._homes or {}
        registered = node in homes.values()
        if homes.get(client, node) != node and (taken or registered):
            raise _Unusable(f"holds client {client}, which another node holds")


def require_same_samples(reported: Mapping[int, int], before: Sequence[float]) -> None:
    """Raise if a client's number of samples has changed since the run was started."""
    for i, now in sorted(reported.items()):
        if now != before[i]:
            raise UserError(
                f"Client {i} has {now} samples, and {before[i]:g} when the run was started: resume "
                "it with the same data, or start another run."
            )


def _reported(response: Response, n: int) -> dict[int, int]:
    """Validate a node's report; return its clients with their numbers of samples."""
    if response.package is None:
        raise _Unusable(response.text)
    clients, samples = (_whole_numbers(response.package, name) for name in ("clients", "samples"))
    if len(clients) != len(samples) or not set(clients) <= set(range(n)):
        raise _Unusable("reports clients that do not exist")
    if len(set(clients)) < len(clients):
        raise _Unusable("reports a client twice")
    if not all(0 < count < 2**53 for count in samples):
        raise _Unusable("reports clients without samples")
    return dict(zip(clients, samples, strict=True))


def _whole_numbers(package: Package, name: str) -> list[int]:
    """Read a list of integers from untrusted settings."""
    numbers = package.settings.get(name)
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise _Unusable("does not report its clients")
    return numbers
