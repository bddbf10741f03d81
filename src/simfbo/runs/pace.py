"""How many rounds run in one compiled call. The results do not depend on it."""

import time

import jax

from simfbo.core.federation import Federation
from simfbo.core.method import Method
from simfbo.core.problem import PyTree
from simfbo.engines.rounds import Rounds, prepare
from simfbo.runs.verdict import measured

_FIRST, _SECONDS = 2, 0.5  # rounds in the first call; the most seconds that a call should take


class Pace:
    """Chooses how many rounds run in one compiled call.

    Attributes:
        root: the key that those of rounds are folded from.
    """

    def __init__(
        self,
        algorithm: Method,
        federation: Federation,
        seed: int,
        rounds: int,
        every: int,
        one_by_one: bool,
    ) -> None:
        """Take what is run, and when it is evaluated.

        Args:
            algorithm: what is run.
            federation: on which it is run.
            seed: of the run.
            rounds: of the run.
            every: rounds between evaluations.
            one_by_one: whether something happens after every round.
        """
        self._algorithm, self._federation = algorithm, federation
        self._rounds, self._every = rounds, every
        self.root, self._fold = jax.random.key(seed), jax.jit(jax.random.fold_in)
        self._most = 1 if one_by_one else _FIRST
        self._compiled: list[Rounds | None] = []  # empty until it is known

    def compiled(self, state: PyTree) -> Rounds | None:
        """Return compiled rounds; None where rounds need the host."""
        if not self._compiled:
            self._compiled.append(prepare(self._algorithm, self._federation, state, measured))
        return self._compiled[0]

    def key(self, t: int) -> jax.Array:
        """Return the key of a round."""
        return self._fold(self.root, t)

    def count(self, t: int) -> int:
        """The number of rounds in the next call, from round t to the next evaluation at most."""
        if t == 1:
            return 1  # its norms are the scale of those to come
        due = min(-(-t // self._every) * self._every, self._rounds)
        return min(self._most, due - t + 1)

    def took(self, rounds: int, seconds: float) -> None:
        """Note how long rounds took: a call should end soon after Ctrl-C."""
        if self._most > 1 and rounds >= min(self._most, _FIRST):
            longest = max(1, int(_SECONDS * rounds / max(seconds, 1e-6)))
            self._most = min(longest, 4 * self._most)


def clocks() -> tuple[float, float]:
    """Return wall-clock and processor seconds, the latter over all threads of this process."""
    return time.perf_counter(), time.process_time()
