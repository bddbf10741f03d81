"""Which node holds which clients: nodes are asked when they come online and after a failure."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from simfbo.errors import UserError
from simfbo.flower.transport import HELLO, Envelope, Package, Response, Transport

LOG = logging.getLogger("simfbo")
_RETRY = 5.0  # seconds until a node that could not be used is asked again


class _Unusable(Exception):
    """A node that cannot be used; the text continues "it ..." and says why."""


class Discovery:
    """The nodes of a federation and their clients.

    Attributes:
        holders: the node of every client that has one.
        samples: the number of samples of every client, as its node reports it.

    Once the run has started, a client belongs to the node that held it then. Only a node that was
    not there at the start may stand in for one that is away, as one that came back under another
    number does, until that is back.
    """

    def __init__(self, transport: Transport, n: int, timeout: float) -> None:
        """Take what carries the messages, the number of clients and the seconds for a reply."""
        self.holders: dict[int, int] = {}
        self.samples: dict[int, int] = {}
        self._homes: dict[int, int] | None = None  # holders at the start of the run
        self._transport, self._n, self._timeout = transport, n, timeout
        self._hellos: dict[int, str | None] = {}  # by node; None once it has replied
        self._problems: dict[int, str] = {}  # nodes that could not be used, and why
        self._retries: dict[int, float] = {}  # when such a node is asked again

    @property
    def missing(self) -> list[int]:
        """Return the clients that no node holds."""
        return [i for i in range(self._n) if i not in self.holders]

    @property
    def problem(self) -> str | None:
        """Return why a node could not be used, of the last one."""
        return next(reversed(self._problems.values()), None)

    @property
    def waiting(self) -> dict[str, int]:
        """Return the nodes that have not replied yet, by the number of the envelope."""
        return {number: node for node, number in self._hellos.items() if number}

    def close(self) -> None:
        """Start the run: from now on a node that reports other nodes' clients is ignored.

        Before, two nodes with the same client are an error.
        """
        self._homes = dict(self.holders)

    def reported_weights(self) -> list[float]:
        """Return the clients' numbers of samples; warn if one of several nodes has most of them."""
        found = [float(self.samples.get(i, 0)) for i in range(self._n)]
        totals: dict[int, float] = {}
        for client, node in self.holders.items():
            totals[node] = totals.get(node, 0.0) + found[client]
        node, most = max(totals.items(), key=lambda pair: pair[1])
        if len(totals) > 2 and most > 0.5 * sum(found):
            share = f"{100 * most / sum(found):.0f} %"
            LOG.warning(
                "Node %s reports %s of all samples, and its clients get that share of the weight: "
                "set p in the deployment if it should not.", node, share,
            )  # fmt: skip
        return found

    def ask(self, online: set[int]) -> None:
        """Ask nodes that are new, or back, which clients they hold."""
        self._hellos = {node: number for node, number in self._hellos.items() if node in online}
        now, unknown = time.monotonic(), sorted(online - self._hellos.keys())
        due = [node for node in unknown if self._retries.get(node, now) <= now]
        if due:
            hellos = [Envelope(node, HELLO, Package({}, {})) for node in due]
            sent = zip(due, self._transport.send(hellos, self._timeout), strict=True)
            self._hellos |= {node: number for node, number in sent if number}

    def ask_again(self, node: int) -> None:
        """Ask a node again, which may have changed."""
        self._hellos.pop(node, None)

    def register(self, node: int, response: Response) -> None:
        """Record which clients a node reports."""
        try:
            held = _reported(response, self._n)
            self._require_free(node, held)
        except _Unusable as error:
            LOG.warning("Node %s cannot be used yet: it %s.", node, error)
            self._problems[node] = str(error)
            self._retries[node] = time.monotonic() + _RETRY
            self.ask_again(node)
            return
        self._hellos[node] = None
        self.holders = {i: holder for i, holder in self.holders.items() if holder != node}
        self.holders |= dict.fromkeys(held, node)
        self.samples |= held
        if self._homes is not None:
            self._homes = dict.fromkeys(held, node) | self._homes

    def _require_free(self, node: int, held: Iterable[int]) -> None:
        """Raise if one of the clients is another node's."""
        others = self._transport.nodes() - {node}
        for client in held:
            holder = self.holders.get(client)
            if self._homes is not None:
                self._require_own(node, client, taken=holder in others)
            elif holder in others:
                raise UserError(
                    f"Two nodes hold client {client} (nodes {holder} and {node}): give every node "
                    "its own clients (--node-config)."
                )

    def _require_own(self, node: int, client: int, taken: bool) -> None:
        """Raise if a client that a node reports during a run is another node's."""
        homes = self._homes or {}
        known = node in homes.values()
        if homes.get(client, node) != node and (taken or known):
            raise _Unusable(f"holds client {client}, which another node holds")


def require_same_samples(reported: Mapping[int, int], before: Sequence[float]) -> None:
    """Raise if a client has another number of samples than when the run was started."""
    for i, now in sorted(reported.items()):
        if now != before[i]:
            raise UserError(
                f"Client {i} has {now} samples, and {before[i]:g} when the run was started: resume "
                "it with the same data, or start another run."
            )


def _reported(response: Response, n: int) -> dict[int, int]:
    """Return the clients that a node reports, with their numbers of samples."""
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
    """Return a list of whole numbers from untrusted settings."""
    numbers = package.settings.get(name)
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise _Unusable("does not report its clients")
    return numbers
