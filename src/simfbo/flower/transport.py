"""The interface of what carries messages between server and nodes, and what passes through it."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from simfbo.core.exchange import Reason
from simfbo.runs.files import Json

HELLO = "hello"  # the request for a node's clients, instead of a client step
Failure = tuple[Reason, str]  # why a node has no response, and the same in words


class Package(NamedTuple):
    """The content of a message.

    Attributes:
        settings: anything that fits into JSON.
        arrays: by name.
        common: arrays that are the same for every node, so that they are sent only once.
    """

    settings: Json
    arrays: dict[str, np.ndarray]
    common: Mapping[str, np.ndarray] = MappingProxyType({})


class Envelope(NamedTuple):
    """A message to a node.

    Attributes:
        node: to which.
        client_step: for which client step.
        package: what it holds.
        exchange: in which exchange.
        largest: the most bytes of arrays that the response may have.
    """

    node: int
    client_step: str
    package: Package
    exchange: int = 0
    largest: int = 0


class Response(NamedTuple):
    """What came back: to which envelope, and either a package or the reason for having none."""

    number: str
    package: Package | None
    reason: Reason = Reason.NODE_FAILED
    text: str = ""


class Transport(Protocol):
    """What carries the messages."""

    def nodes(self) -> set[int]:
        """Return the nodes that are online."""
        ...

    def send(self, envelopes: Sequence[Envelope], seconds: float) -> list[str | None]:
        """Send envelopes that expire after some seconds.

        Returns:
            Their numbers; None for an envelope that could not be sent.
        """
        ...

    def fetch(self, numbers: Iterable[str]) -> list[Response]:
        """Return the responses that have arrived to envelopes of these numbers, each only once."""
        ...
