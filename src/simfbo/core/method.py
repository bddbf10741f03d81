"""Methods as data: their numbers are inputs of compiled programs, the rest selects the program."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple, Self

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer

from simfbo.core.federation import Client, ClientStep, Federation
from simfbo.core.problem import Point, PyTree
from simfbo.errors import UserError


class BoundStep:
    """A client step bound to a method or another module, as a pytree.

    Attributes:
        step: the marked function of (module, payload, client).
        module: the method or module.
    """

    __slots__ = ("module", "step")

    def __init__(self, step: "client_step", module: Any) -> None:
        """Bind a step to a module."""
        self.step, self.module = step, module

    @property
    def __name__(self) -> str:
        return self.step.function.__name__

    @property
    def uncoded(self) -> bool:
        """Whether its messages are sent without codecs."""
        return self.step.uncoded

    def __call__(self, payload: PyTree, client: Client) -> PyTree:
        """Run the step."""
        return self.step.function(self.module, payload, client)


jax.tree_util.register_pytree_node(
    BoundStep,
    lambda bound: ((bound.module,), bound.step),
    lambda step, modules: BoundStep(step, modules[0]),
)


class client_step:
    """Mark a method of a class as a client step: (self, payload, client) -> message.

    The name of the method identifies the step in the ledger and in requests to other machines,
    which run marked methods only.
    """

    def __init__(self, function: Callable[..., PyTree], uncoded: bool = False) -> None:
        """Mark a function.

        Args:
            function: the method.
            uncoded: send its messages without codecs, as for measurements.
        """
        self.function, self.uncoded = function, uncoded
        self.__doc__ = function.__doc__
        self.__isabstractmethod__ = getattr(function, "__isabstractmethod__", False)

    def __get__(self, module: Any, kind: type) -> Any:
        return self if module is None else BoundStep(self, module)


class Method(eqx.Module):
    """A federated bilevel method: settings, client steps and server steps.

    A field is a number or a pytree of numbers, and an input of every compiled program; or it is
    declared with `eqx.field(static=True)` and selects the program. A change of numbers needs no
    compilation. A subclass defines `init`, `round` and client steps, which are marked with
    `client_step`; the other methods are optional.

    Attributes:
        name: in reports and figures; by default that of the class.
        known_violations: laws of `simfbo.checks` that do not hold by construction, with reasons.
        residuals: the channels of sums that vanish at the solution, by the name of the client step,
            as in `{"simfbo_step": "xyv"}`, for the verdict on convergence.
        needs_unmodified_sums: the server must receive messages once and unchanged, because its
            state depends on the clients' memory: no aggregator, lossy codec, momenta, clipping or
            repeated clients in a cohort.
        is_personal: every client has a personal lower variable.
        asks_again: a cohort takes part in several exchanges, as for measurements of step sizes.
    """

    name: ClassVar[str] = "Method"
    known_violations: ClassVar[Mapping[str, str]] = {}
    residuals: ClassVar[Mapping[str, str]] = {}
    needs_unmodified_sums: ClassVar[bool] = False
    is_personal: ClassVar[bool] = False
    asks_again: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        named = next(kind for kind in cls.__mro__ if "name" in vars(kind))
        if vars(named)["name"] == named.__name__:  # the default
            cls.name = cls.__name__

    @abstractmethod
    def init(self, x: PyTree, y: PyTree) -> Any:
        """Return the state before the first round."""

    @abstractmethod
    def round(self, state: Any, federation: Federation, key: jax.Array) -> Any:
        """Return the state after one iteration; each `federation.sum` is one exchange."""

    def point(self, state: Any) -> Point[PyTree]:
        """Return x, y and v of a state; v is None for a method without one."""
        return Point(state.x, state.y, getattr(state, "v", None))

    @property
    def client_steps(self) -> dict[str, ClientStep]:
        """All client steps that `round` passes to the federation, by name."""
        return marked(self)

    def client_memory(self, x: PyTree, y: PyTree) -> PyTree:
        """Return the initial memory of a client; None for stateless clients.

        Client steps of a method with memory return `WithMemory`.
        """
        return None

    @property
    def has_memory(self) -> bool:
        """Whether clients are stateful."""
        return type(self).client_memory is not Method.client_memory

    def client_y(self, memory: PyTree) -> PyTree:
        """Return y_i from the memory of a client, if the lower level is personal."""
        return memory.y

    def evaluation_point(self, state: Any) -> Point[PyTree]:
        """Return the x and y that clients receive for an evaluation."""
        return self.point(state)

    def counters(self, state: Any) -> dict[str, int]:
        """Return counts for the records of the history."""
        projected = getattr(state, "projected", None)
        return {} if projected is None else {"projected": int(projected)}

    def evidence(self, state: Any) -> dict[str, float] | None:
        """Measurements of convergence by name, for the verdict; see `auto_steps`. None for none."""
        return None

    def prepare(self, state: Any, federation: Federation, key: jax.Array) -> Any:
        """Update the initial state by measurements before the first round.

        `run` calls it once, and `conclude` after the last round; both run on the host.
        """
        return state

    def conclude(self, state: Any, federation: Federation, key: jax.Array) -> Any:
        """Update the state after the last round."""
        return state

    def __check_init__(self) -> None:
        _require_numbers(self)
        for field in fields(self):  # including static fields
            _require_no_array(f"{type(self).__name__}.{field.name}", getattr(self, field.name))


def _inner(name: str) -> Any:
    """Return a property that delegates to the inner method."""
    return property(lambda self: getattr(self.inner, name))


class Wrapper(Method):
    """A method that modifies another one; by default everything is delegated.

    Attributes:
        inner: the wrapped method.
    """

    inner: Method

    name = _inner("name")
    known_violations = _inner("known_violations")
    residuals = _inner("residuals")
    needs_unmodified_sums = _inner("needs_unmodified_sums")
    is_personal = _inner("is_personal")
    asks_again = _inner("asks_again")
    has_memory = _inner("has_memory")  # pyright: ignore[reportIncompatibleMethodOverride]

    def inner_state(self, state: Any) -> Any:
        """Return the inner method's part of a state."""
        return state

    def with_inner_state(self, state: Any, inner: Any) -> Any:
        """Replace the inner method's part of a state."""
        return inner

    def view(self, state: Any, federation: Federation) -> Federation:
        """Return the federation for the inner method."""
        return federation

    def round(self, state: Any, federation: Federation, key: jax.Array) -> Any:
        """Run a round of the inner method on its view of the federation."""
        return self._run(self.inner.round, state, federation, key)

    def prepare(self, state: Any, federation: Federation, key: jax.Array) -> Any:
        """Prepare the inner method."""
        return self._run(self.inner.prepare, state, federation, key)

    def conclude(self, state: Any, federation: Federation, key: jax.Array) -> Any:
        """Conclude the inner method."""
        return self._run(self.inner.conclude, state, federation, key)

    def _run(self, phase: Any, state: Any, federation: Federation, key: jax.Array) -> Any:
        inner = phase(self.inner_state(state), self.view(state, federation), key)
        return self.with_inner_state(state, inner)

    def init(self, x: PyTree, y: PyTree) -> Any:
        """Return the inner method's initial state."""
        return self.inner.init(x, y)

    def point(self, state: Any) -> Point[PyTree]:
        """Return x, y and v of the inner state."""
        return self.inner.point(self.inner_state(state))

    def client_memory(self, x: PyTree, y: PyTree) -> PyTree:
        """Return the inner method's memory."""
        return self.inner.client_memory(x, y)

    def client_y(self, memory: PyTree) -> PyTree:
        """Return y_i from the memory of a client."""
        return self.inner.client_y(memory)

    def evaluation_point(self, state: Any) -> Point[PyTree]:
        """Return x and y of the inner state."""
        return self.inner.evaluation_point(self.inner_state(state))

    def counters(self, state: Any) -> dict[str, int]:
        """Return the inner method's counts."""
        return self.inner.counters(self.inner_state(state))

    def evidence(self, state: Any) -> dict[str, float] | None:
        """Return the inner method's measurements of convergence."""
        return self.inner.evidence(self.inner_state(state))


class WrappedStep(eqx.Module):
    """A client step that modifies another one and has its name."""

    step: ClientStep = eqx.field(converter=lambda step: as_module(step))

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.step.__name__

    @property
    def uncoded(self) -> bool:
        """Whether messages are sent without codecs."""
        return is_uncoded(self.step)


class Closure(eqx.Module):
    """A plain function as a client step: its numbers are constants of the compiled program."""

    function: Callable[..., Any] = eqx.field(static=True)

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def uncoded(self) -> bool:
        """Whether messages are sent without codecs."""
        return getattr(self.function, "uncoded", False)

    def __call__(self, payload: PyTree, client: Client) -> PyTree:
        """Call the function."""
        return self.function(payload, client)


def as_module(step: ClientStep) -> Any:
    """Convert a client step to a pytree with its numbers as leaves."""
    return step if isinstance(step, eqx.Module | BoundStep) else Closure(step)


def is_uncoded(step: ClientStep) -> bool:
    """Check if the messages of a client step are sent without codecs, as for measurements."""
    return getattr(step, "uncoded", False)


class Parts(NamedTuple):
    """A method or client step in two parts: the key of a program and the program's inputs.

    Attributes:
        structure: everything except the numbers.
        numbers: as Python floats, or traced. So 1, 0.1, np.float64(0.1) and jnp.asarray(0.1) are
            inputs of the same program, and none of them promotes the dtype of a state.
    """

    structure: Any
    numbers: tuple[Any, ...]

    @classmethod
    def of(cls, module: Any) -> Self:
        """Split a method or client step."""
        leaves, structure = jax.tree.flatten(module)
        try:
            numbers = [leaf if isinstance(leaf, Tracer) else float(leaf) for leaf in leaves]
        except (TypeError, ValueError):
            _require_numbers(module)
            raise
        return cls(structure, tuple(numbers))

    def joined(self) -> Any:
        """Restore the method or client step."""
        return jax.tree.unflatten(self.structure, self.numbers)


def marked(*modules: eqx.Module) -> dict[str, ClientStep]:
    """Return the client steps of some modules by name."""
    return {
        name: getattr(module, name)
        for module in modules
        for name in dir(type(module))
        if isinstance(getattr(type(module), name), client_step)
    }


def _require_numbers(module: Any) -> None:
    """Raise unless the leaves of a method or client step are numbers."""
    module = module.module if isinstance(module, BoundStep) else module
    for path, leaf in jax.tree.leaves_with_path(module):
        name = type(module).__name__ + jax.tree_util.keystr(path)
        _require_no_array(name, leaf)
        if isinstance(leaf, bool | np.bool_ | str) or not hasattr(leaf, "__float__"):
            raise UserError(
                f"{name} is not a number: declare the field with eqx.field(static=True)."
            )


def _require_no_array(name: str, value: Any) -> None:
    """Raise if a field of a method or client step is an array."""
    if isinstance(value, np.ndarray | jax.Array) and value.ndim:
        raise UserError(f"{name} is an array: put it into the state, or into the clients' data.")


def require_unmodified_sums(method: Method, what: str) -> None:
    """Raise if a method needs unmodified sums, but `what` modifies them."""
    if method.needs_unmodified_sums:
        raise UserError(
            f"{method.name} keeps account of the memory of its clients, which {what} would "
            'falsify: leave that out, or use control="mean".'
        )
