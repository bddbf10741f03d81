"""The ledger: what a federation sent, counted from the messages themselves.

Payloads and messages are counted. The few numbers that say how to work on them (which client step,
local steps, step sizes, a random key) travel with the request and are not, except with codecs,
where they are 32 bytes for each client and exchange. Evaluations on clients are counted apart from
training, so that totals compare methods.
"""

import math
from dataclasses import dataclass, field
from operator import add
from typing import Any, NamedTuple

import jax

from simfbo.core.exchange import EVALUATION, EncodedBytes
from simfbo.core.problem import CHANNELS, PyTree, channel


class PerClient(NamedTuple):
    """A part of a payload that differs from client to client.

    Slice j of every leaf goes to the cohort's j-th client, which finds it in this part's place.

    Attributes:
        slices: a pytree whose leaves have one slice per client of the cohort along the first axis.
    """

    slices: PyTree


class Traffic(NamedTuple):
    """Exchanges, floats and bytes, added over all clients.

    Attributes:
        rounds: exchanges.
        floats_down: numbers sent to clients, however they are coded.
        floats_up: numbers sent back.
        bytes_down: bytes sent to clients.
        bytes_up: bytes sent back.
        estimated: how many of the bytes are estimated.
        variance: of the estimate.
    """

    rounds: int = 0
    floats_down: int = 0
    floats_up: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    estimated: int = 0
    variance: float = 0.0

    def plus(self, other: "Traffic") -> "Traffic":
        """Add two amounts of traffic."""
        sums: list[Any] = list(map(add, self, other))
        return Traffic(*sums)

    @property
    def uncertainty(self) -> float:
        """Return by which share of themselves the bytes may be off; 0 if they were counted.

        Two standard deviations of the sample of clients, and 0.5 %, to which the length of a range
        code is computed for messages of a kilobyte and more; of tiny ones it may be off by a word.
        """
        if not self.estimated:
            return 0.0
        doubt = 0.005 * self.estimated + 2 * math.sqrt(self.variance)
        return doubt / (self.bytes_down + self.bytes_up)


@dataclass
class Ledger:
    """What a federation sent.

    Attributes:
        total: exchanges, floats and bytes of training, added over all clients.
        by_step: the same, by the name of the client step; evaluations on clients are in
            "client_metrics" and nowhere else.
        by_channel: bytes both ways, by channel: x, y and v, "other" for what belongs to none of
            them, and "coded" for coded messages, whose bytes are counted as a whole.
    """

    total: Traffic = field(default_factory=Traffic)
    by_step: dict[str, Traffic] = field(default_factory=dict)
    by_channel: dict[str, int] = field(default_factory=dict)

    @property
    def evaluation(self) -> Traffic:
        """Return what evaluations on clients sent, which is not in `total`."""
        return self.by_step.get(EVALUATION, Traffic())

    def copied(self) -> "Ledger":
        """Return a ledger that says the same, and goes on by itself."""
        return Ledger(self.total, dict(self.by_step), dict(self.by_channel))

    def record(
        self,
        client_step: str,
        asked: int,
        replied: int,
        down: PyTree,
        up: PyTree,
        exchanges: int = 1,
        coded: EncodedBytes | None = None,
    ) -> None:
        """Count exchanges of one kind.

        Args:
            client_step: its name.
            asked: clients that were asked, in all exchanges together.
            replied: those that replied.
            down: the payload, or another like it.
            up: one client's message, or another like it.
            exchanges: how many.
            coded: how many bytes they had; by default, that of their numbers.
        """
        sizes_down, sizes_up = _sizes(down, asked, exchanges), _sizes(up, replied, exchanges)
        floats_down, bytes_down = map(sum, zip((0, 0), *sizes_down, strict=True))
        floats_up, bytes_up = map(sum, zip((0, 0), *sizes_up, strict=True))
        sent = EncodedBytes(bytes_down, bytes_up) if coded is None else coded
        whole = round(sent.down), round(sent.up), round(sent.estimated)
        parts = zip([*payload_channels(down), *_message_channels(up)], [*sizes_down, *sizes_up],
                    strict=True)  # fmt: skip
        counted = [(name or "other", encoded_bytes) for name, (_, encoded_bytes) in parts]
        exchange = Traffic(exchanges, floats_down, floats_up, *whole, float(sent.variance))
        self.by_step[client_step] = self.by_step.get(client_step, Traffic()).plus(exchange)
        if client_step == EVALUATION:
            return
        self.total = self.total.plus(exchange)
        for name, encoded_bytes in counted if coded is None else [("coded", whole[0] + whole[1])]:
            self.by_channel[name] = self.by_channel.get(name, 0) + encoded_bytes


def is_per_client(part: PyTree) -> bool:
    """Return whether a part of a payload differs from client to client."""
    return isinstance(part, PerClient)


def _width(dtype: Any) -> int:
    """Return the bytes of a number, in the precision in which it is computed and sent."""
    return jax.dtypes.canonicalize_dtype(dtype).itemsize


def _sizes(message: PyTree, clients: int, exchanges: int) -> list[tuple[int, int]]:
    """Return how many numbers and bytes all clients together send or receive, leaf by leaf."""
    sizes: list[tuple[int, int]] = []
    for part in jax.tree.leaves(message, is_leaf=is_per_client):
        times, own = exchanges if is_per_client(part) else clients, jax.tree.leaves(part)
        numbers = times * sum(leaf.size for leaf in own)
        sizes.append((numbers, times * sum(leaf.size * _width(leaf.dtype) for leaf in own)))
    return sizes


def payload_parts(payload: PyTree) -> tuple[PyTree, ...]:
    """Return the parts of a payload; the first three stand for x, y and v."""
    if isinstance(payload, tuple) and not is_per_client(payload):
        return payload
    return ((), (), (), payload)


def payload_channels(payload: PyTree) -> list[str | None]:
    """Return the channel of each leaf of a payload; None for what differs by client."""
    return [
        CHANNELS[j] if j < len(CHANNELS) and not is_per_client(leaf) else None
        for j, part in enumerate(payload_parts(payload))
        for leaf in jax.tree.leaves(part, is_leaf=is_per_client)
    ]


def _message_channels(message: PyTree) -> list[str | None]:
    """Return the channel of each leaf of a message."""
    return [channel(path) for path, _ in jax.tree.leaves_with_path(message)]
