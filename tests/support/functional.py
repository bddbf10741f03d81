"""A method made of functions: the shortest way to write one for a test."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx

from simfbo import Method
from simfbo.core.method import ClientStep, Wrapper


class Functional(Method):
    """A method made of functions.

    Attributes:
        label: its name.
        start: (x, y) -> state.
        iterate: (state, federation, key) -> state.
        steps: the client steps that it uses.
        memory: (x, y) -> the memory of a client before it first takes part; None for none.
    """

    label: str = eqx.field(static=True)
    start: Callable[..., Any] = eqx.field(static=True)
    iterate: Callable[..., Any] = eqx.field(static=True)
    steps: Sequence[ClientStep] = eqx.field(static=True, default=())
    memory: Callable[..., Any] | None = eqx.field(static=True, default=None)

    def init(self, x: Any, y: Any) -> Any:
        return self.start(x, y)

    def round(self, state: Any, federation: Any, key: Any) -> Any:
        return self.iterate(state, federation, key)

    @property
    def name(self) -> str:
        return self.label

    @property
    def client_steps(self) -> dict[str, ClientStep]:
        return {step.__name__: step for step in self.steps}

    def client_memory(self, x: Any, y: Any) -> Any:
        return None if self.memory is None else self.memory(x, y)

    @property
    def has_memory(self) -> bool:
        return self.memory is not None


class Changed(Wrapper):
    """A method with another round.

    Attributes:
        change: (round, state, federation, key) -> state, with the method's own round.
        violations: its known violations; None for those of the method.
    """

    change: Callable[..., Any] = eqx.field(static=True)
    violations: dict[str, str] | None = eqx.field(static=True, default=None)

    def round(self, state: Any, federation: Any, key: Any) -> Any:
        return self.change(self.inner.round, state, federation, key)

    @property
    def known_violations(self) -> Any:
        return self.inner.known_violations if self.violations is None else self.violations


def unchanged(round: Any, *given: Any) -> Any:
    return round(*given)
