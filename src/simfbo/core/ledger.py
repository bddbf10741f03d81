"""The ledger: the traffic of a federation, counted from the messages themselves.

Payloads and messages are counted. The metadata of requests (client step, local steps, step sizes,
random key) is not, except with codecs, where it adds 32 bytes for each client and exchange.
Evaluations on clients are counted separately from training, so that totals are comparable.
"""

import math
from dataclasses import dataclass, field
from operator import add, mul
from typing import Any, NamedTuple

import jax

from simfbo.core.exchange import EVALUATION, EncodedBytes
from simfbo.core.problem import CHANNELS, PyTree, channel


class PerClient(NamedTuple):
    """A part of a payload that differs between clients.

    The cohort's j-th client receives slice j of every leaf in place of this part.

    Attributes:
        slices: a pytree with one slice per client of the cohort along the first axis of all leaves.
    """

    slices: PyTree


class Traffic(NamedTuple):
    """Exchanges, floats and bytes, added over all clients.

    Attributes:
        rounds: exchanges.
        floats_down: numbers sent to clients, with or without codecs.
        floats_up: numbers sent back.
        bytes_down: bytes sent to clients.
        bytes_up: bytes sent back.
        estimated: the estimated part of the bytes.
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
        """The relative uncertainty of the bytes; 0 if they were counted.

        It is two standard deviations of the sample of clients, plus 0.5 % for the computed length
        of a range code, which is accurate to that for messages of a kilobyte and more.
        """
        if not self.estimated:
            return 0.0
        uncertainty = 0.005 * self.estimated + 2 * math.sqrt(self.variance)
        return uncertainty / (self.bytes_down + self.bytes_up)


@dataclass
class Ledger:
    """The traffic of a federation.

    Attributes:
        total: exchanges, floats and bytes of training, added over all clients.
        by_step: the same, by the name of the client step; evaluations on clients are only here, as
            "client_metrics".
        by_channel: bytes both ways, by channel: x, y and v, "other" for leaves without a channel,
            and "coded" for coded messages, which are counted as a whole.
    """

    total: Traffic = field(default_factory=Traffic)
    by_step: dict[str, Traffic] = field(default_factory=dict)
    by_channel: dict[str, int] = field(default_factory=dict)

    @property
    def evaluation(self) -> Traffic:
        """The traffic of evaluations on clients, which is not in `total`."""
        return self.by_step.get(EVALUATION, Traffic())

    def copied(self) -> "Ledger":
        """Return an independent copy."""
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
        """Count exchanges with one client step.

        Args:
            client_step: its name.
            asked: the number of clients asked, in all exchanges together.
            replied: the number of replies.
            down: the payload, or a pytree of the same shapes.
            up: a client's message, or a pytree of the same shapes.
            exchanges: the number of exchanges.
            coded: the bytes of coded messages; by default they are counted from the shapes.
        """
        sizes_down, sizes_up = _sizes(down, asked, exchanges), _sizes(up, replied, exchanges)
        floats_down, bytes_down = map(sum, zip((0, 0), *sizes_down, strict=True))
        floats_up, bytes_up = map(sum, zip((0, 0), *sizes_up, strict=True))
        if coded is None:
            sent = EncodedBytes(bytes_down, bytes_up)
            channels = [channel(path) for path, _ in jax.tree.leaves_with_path(up)]
            channels = [name or "other" for name in (*payload_channels(down), *channels)]
            sizes = [size for _, size in (*sizes_down, *sizes_up)]
        else:
            sent, channels, sizes = coded, ["coded"], [round(coded.down) + round(coded.up)]
        exchange = Traffic(
            exchanges,
            floats_down,
            floats_up,
            round(sent.down),
            round(sent.up),
            round(sent.estimated),
            float(sent.variance),
        )
        self.by_step[client_step] = self.by_step.get(client_step, Traffic()).plus(exchange)
        if client_step != EVALUATION:
            self.total = self.total.plus(exchange)
            for name, size in zip(channels, sizes, strict=True):
                self.by_channel[name] = self.by_channel.get(name, 0) + size


def is_per_client(part: PyTree) -> bool:
    """Check if a part of a payload differs between clients."""
    return isinstance(part, PerClient)


def _sizes(message: PyTree, clients: int, exchanges: int) -> list[tuple[int, int]]:
    """Count the numbers and bytes of each leaf, added over all clients."""

    def size(part: PyTree) -> tuple[int, int]:
        times, leaves = exchanges if is_per_client(part) else clients, jax.tree.leaves(part)
        # Numbers are computed and sent in JAX's precision.
        widths = [jax.dtypes.canonicalize_dtype(leaf.dtype).itemsize for leaf in leaves]
        counts = [leaf.size for leaf in leaves]
        return times * sum(counts), times * sum(map(mul, counts, widths))

    return [size(part) for part in jax.tree.leaves(message, is_leaf=is_per_client)]


def payload_parts(payload: PyTree) -> tuple[PyTree, ...]:
    """Split a payload into parts, of which the first three are x, y and v."""
    if isinstance(payload, tuple) and not is_per_client(payload):
        return payload
    return ((), (), (), payload)


def payload_channels(payload: PyTree) -> list[str | None]:
    """Return the channel of each leaf of a payload; None for `PerClient` parts."""
    return [
        CHANNELS[j] if j < len(CHANNELS) and not is_per_client(leaf) else None
        for j, part in enumerate(payload_parts(payload))
        for leaf in jax.tree.leaves(part, is_leaf=is_per_client)
    ]
