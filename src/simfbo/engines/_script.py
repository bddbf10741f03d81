"""The script of a round: its exchanges, and what the server draws for them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from simfbo.codecs.messages import Codecs
from simfbo.core.problem import PyTree
from simfbo.core.sampling import Cohort
from simfbo.engines._batches import Layout
from simfbo.engines._server import Row, Server


class OneExchange(NamedTuple):
    """One exchange of a round.

    Attributes:
        name: of the client step.
        down: the payload, abstract.
        like: a message, abstract.
        size: clients in the cohort.
        stacked: whether messages are kept one by one.
        layout: how they are computed.
        codecs: how they are coded; None for not at all.
    """

    name: str
    down: PyTree
    like: PyTree
    size: int
    stacked: bool
    layout: Layout
    codecs: Codecs | None = None


class Event(NamedTuple):
    """One draw of the server: of a cohort, of an exchange with one of them, or of rho."""

    kind: str
    cohort: int = 0


class Script(NamedTuple):
    """What happens in every round.

    Attributes:
        exchanges: in order.
        events: the server's draws, in order; empty if it draws nothing anew.
        keys: (root, first round) -> the keys of all events of the following rounds.
    """

    exchanges: tuple[OneExchange, ...]
    events: tuple[Event, ...]
    keys: Callable[[jax.Array, Any], list[jax.Array]] | None

    def draw(self, server: Server, root: jax.Array, first: int, count: int) -> list[list[Any]]:
        """Draw for some rounds.

        Returns:
            What was drawn for every event, by round; fewer rounds where a cohort is of another
            size than the others.
        """
        if self.keys is None:
            return []
        words = [np.asarray(key) for key in self.keys(root, np.int32(first))]
        rounds: list[list[Any]] = []
        for k in range(count):
            found: list[Any] = []
            cohorts: list[Cohort] = []
            for event, keys in zip(self.events, words, strict=True):
                key = server.key(keys[k])
                if event.kind == "cohort":
                    cohorts.append(server.draw_cohort(key))
                    found.append(cohorts[-1])
                elif event.kind == "rho":
                    found.append(server.draw_rho(key))
                else:
                    found.append(server.draw_row(key, cohorts[event.cohort]))
            if any(len(cohort.ids) != len(server.example.ids) for cohort in cohorts):
                break
            rounds.append(found)
        return rounds

    def rows(self, drawn: list[Any]) -> list[Row]:
        """Return what was drawn for every exchange of a round."""
        return [one for one in drawn if isinstance(one, Row)]


def as_inputs(server: Server, rounds: list[list[Any]], length: int) -> list[Any]:
    """Return what was drawn as inputs of a program, one row per round, padded to `length`."""

    def needed(one: Any) -> Any:
        if not isinstance(one, Row):
            return one if server.cohort is None or not isinstance(one, Cohort) else None
        work = one.work.of(one.cohort.ids) if server.work is None else None
        return work, ~one.absent if server.absent is None else None

    def stack(*values: Any) -> np.ndarray:
        array = np.stack(values)
        return np.concatenate(
            [array, np.zeros((length - len(array), *array.shape[1:]), array.dtype)]
        )

    return [jax.tree.map(stack, *map(needed, column)) for column in zip(*rounds, strict=True)]
