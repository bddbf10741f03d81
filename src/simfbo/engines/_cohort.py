"""What a cohort is computed from, and what is found: the same for lanes and for batches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from simfbo.codecs.messages import Codecs, code_message, up_key
from simfbo.core.data import ClientData, OwnSplit
from simfbo.core.federation import Client, ClientStep
from simfbo.core.keys import client_key
from simfbo.core.local_work import LocalPlan
from simfbo.core.problem import PyTree
from simfbo.engines._messages import answer
from simfbo.privacy import clipped_again

Rows = Any  # an array: NumPy's outside of a trace, JAX's inside


class Stacks(NamedTuple):
    """All clients' data, client after client along the first axis."""

    lower: OwnSplit
    upper: OwnSplit


class Inputs(NamedTuple):
    """What a cohort is computed from, by position in the cohort where clients differ.

    Attributes:
        payload: what the clients receive.
        data: the clients' data.
        places: where each client's data is.
        ids: the clients' numbers, which their keys depend on.
        repeats: which of a client's draws it is.
        weights: of the messages.
        plan: local work; without a leading axis where all clients have the same.
        numbers: of the client step.
        present: who replies; None where everybody does, and only what is not finite is refused.
            Then it is enough to know whether there is any such message.
        look: whether squared norms and probes are wanted, where `present` is None; None for never.
        limit: the gate's; None for an open one.
        window: the first position whose message is probed; None where none is.
        weighed: positions whose coded bytes are computed; None for all of them.
        key: of the exchange.
        memory: what the clients remember; None if nothing.
    """

    payload: PyTree
    data: Stacks | ClientData
    places: Rows
    ids: Rows
    repeats: Rows
    weights: Rows
    plan: LocalPlan
    numbers: tuple[Any, ...]
    present: Rows | None
    look: Any
    limit: Any
    window: Any
    weighed: Any
    key: jax.Array
    memory: PyTree = None

    def is_weighed(self, position: Any) -> Any:
        """Return whether the bytes of the message at a position are computed."""
        return True if self.weighed is None else jnp.any(jnp.asarray(self.weighed) == position)


class Found(NamedTuple):
    """What was computed of a cohort.

    Attributes:
        total: the weighted sum of the messages that passed the gate, or all of them, stacked.
        squares: the squared norms of all messages, by position and leaf.
        passed: which of them passed the gate; None for all of them.
        probes: what is compared of some (`simfbo.robust.anomalies`); None where nothing is.
        finite: whether all messages are finite, where `passed` is None.
        octets: bytes of the coded messages, zero where they are not computed; None without codecs.
        memory: what the clients remember if their messages count.
    """

    total: PyTree
    squares: Any
    passed: Any
    probes: Any
    finite: Any = True
    octets: Any = None
    memory: PyTree = None


class Sent(NamedTuple):
    """What became of a client's step.

    Attributes:
        message: as it arrives.
        octets: its bytes; None without codecs.
        memory: what the client remembers if the message counts.
    """

    message: PyTree
    octets: Any
    memory: PyTree


class Place(NamedTuple):
    """Whose message it is, and in which exchange."""

    key: jax.Array
    client: Any
    repeat: Any


class Sender(NamedTuple):
    """A client step and how its messages travel; it is a part of the compiled program.

    Attributes:
        structure: of the client step.
        codecs: how messages are coded; None for not at all.
    """

    structure: Any
    codecs: Codecs | None

    def step(self, inputs: Inputs) -> ClientStep:
        """Return the client step with its numbers."""
        return jax.tree.unflatten(self.structure, inputs.numbers)


def send(
    codecs: Codecs | None,
    step: ClientStep,
    payload: PyTree,
    client: Client,
    place: Place,
    weigh: Any = True,
) -> Sent:
    """Run a client step and return what arrives of its message.

    Args:
        codecs: how messages are coded; None for not at all.
        step: what the client does.
        payload: what the client receives.
        client: who it is.
        place: what its code is drawn from.
        weigh: whether the bytes are wanted; otherwise they are zero.
    """
    message, memory = answer(step, payload, client)
    if codecs is None:
        return Sent(message, None, memory)
    key = client_key(up_key(place.key), place.client, place.repeat)
    coded = code_message(codecs, message, key)
    octets = jax.lax.cond(weigh, coded.weigh, lambda: jnp.zeros(()))
    return Sent(clipped_again(step, coded.tree), octets, memory)
