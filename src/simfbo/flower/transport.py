"""The interface of transports between server and nodes, and their messages."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from simfbo.core.exchange import Reason
from simfbo.runs.files import Json

HELLO = "hello"  # in place of a client step: the request for a node's clients
Failure = tuple[Reason, str]  # the reason for a missing response, and its text


class Package(NamedTuple):
    """The content of a message.

    Attributes:
        settings: JSON values.
        arrays: by name.
        common: arrays that are the same for every node, so that they are sent only once.
    """

    settings: Json
    arrays: dict[str, np.ndarray]
    common: Mapping[str, np.ndarray] = MappingProxyType({})


class Envelope(NamedTuple):
    """A message to a node.

    Attributes:
        node: the recipient.
        client_step: its name.
        package: the content.
        exchange: its number.
        largest: the largest number of bytes of arrays in the response.
    """

    node: int
    client_step: str
    package: Package
    exchange: int = 0
    largest: int = 0


class Response(NamedTuple):
    """A response: the number of its envelope, and a package or the reason why there is none."""

    number: str
    package: Package | None
    reason: Reason = Reason.NODE_FAILED
    text: str = ""


class Transport(Protocol):
    """Carries messages."""

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
