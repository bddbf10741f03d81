"""What a cohort is computed from, and what is found: the same for lanes and for batches."""

from typing import Any, NamedTuple

import jax

from simfbo.core.data import ClientData, OwnSplit
from simfbo.core.local_work import LocalPlan
from simfbo.core.problem import Point, PyTree

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
        eta: the clients' step sizes.
        present: who replies; None where everybody does, and only what is not finite is refused.
            Then it is enough to know whether there is any such message.
        look: whether squared norms and probes are wanted, where `present` is None.
        limit: the gate's; None for an open one.
        window: the first position whose message is probed.
        key: of the exchange.
    """

    payload: PyTree
    data: Stacks | ClientData
    places: Rows
    ids: Rows
    repeats: Rows
    weights: Rows
    plan: LocalPlan
    eta: Point[PyTree]
    present: Rows | None
    look: Any
    limit: Any
    window: Any
    key: jax.Array


class Found(NamedTuple):
    """What was computed of a cohort.

    Attributes:
        total: the weighted sum of the messages that passed the gate, or all of them, stacked.
        squares: the squared norms of all messages, by position and leaf.
        passed: which of them passed the gate; None for all of them.
        probes: what is compared of some (`simfbo.core.watch`).
        finite: whether all messages are finite, where `passed` is None.
    """

    total: PyTree
    squares: Any
    passed: Any
    probes: Any
    finite: Any = True
