"""What an algorithm was built with, and what is built only once for it."""

from collections.abc import Callable
from functools import lru_cache, partial, wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar, get_origin, overload

import jax
import numpy as np

from simfbo.core.federation import Algorithm, Tracing
from simfbo.core.problem import Point
from simfbo.errors import UserError, brief

P = ParamSpec("P")
R = TypeVar("R")


def once_per_problem(build: Callable[P, R]) -> Callable[P, R]:
    """Build client steps once per problem and options.

    A program is compiled per client step, and step sizes are its inputs, so a method compiles once
    per problem, whatever its step sizes.
    """
    kept, form = lru_cache(maxsize=32)(build), signature(build)

    @wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = form.bind(*args, **kwargs)
        bound.apply_defaults()  # an option that is left out is the same as its default
        try:
            return kept(*bound.args, **bound.kwargs)
        except TypeError as error:
            if "unhashable" not in str(error):
                raise
            return build(*args, **kwargs)

    return built


@overload
def with_settings(factory: Callable[P, Algorithm]) -> Callable[P, Algorithm]: ...


@overload
def with_settings(
    *, private: bool
) -> Callable[[Callable[P, Algorithm]], Callable[P, Algorithm]]: ...


def with_settings(factory: Any = None, *, private: bool = False) -> Any:
    """Let an algorithm remember what it was built with.

    A run is resumed with the same only, and programs are shared by algorithms that differ in step
    sizes alone: the arguments `local`, `server` and `steps`, where they are numbers.

    Args:
        factory: what builds the algorithm.
        private: whether it can solve problems with a personal lower level; others are refused.
    """
    if factory is None:
        return partial(with_settings, private=private)
    form = signature(factory)

    @wraps(factory)
    def built(*args: Any, **kwargs: Any) -> Algorithm:
        bound = form.bind(*args, **kwargs)
        bound.apply_defaults()
        settings = bound.arguments
        if not private:
            _require_shared(factory.__name__, settings.get("problem"))
        for name, value in settings.items():
            if get_origin(form.parameters[name].annotation) is Point:
                _require_point(name, value)
        made = factory(*args, **kwargs)._replace(settings=settings)
        numbers = {name: settings[name] for name in _STEPS if _is_numbers(settings.get(name))}
        others = tuple((name, value) for name, value in settings.items() if name not in numbers)
        if not _is_hashable(others):
            return made
        remade: Any = factory
        return made._replace(
            tracing=Tracing(
                made.round,
                form=(factory, others),
                numbers=jax.tree.map(lambda size: np.asarray(size, float), numbers),
                remake=lambda numbers: remade(**{**settings, **numbers}),
            )
        )

    return built


_STEPS = ("local", "server", "steps")


def _require_shared(name: str, problem: Any) -> None:
    """Raise if a problem has a personal lower level."""
    if getattr(problem, "lower_level", "shared") == "private":
        raise UserError(
            f"'{name}' needs a lower problem that all clients share: for a personal lower level "
            "use simfbo, shrofbo or fedbioacc_local."
        )


def _require_point(name: str, steps: Any) -> None:
    """Raise unless step sizes are one for each variable."""
    if not isinstance(steps, tuple) or len(steps) != 3:
        raise UserError(f"Give {name} as Point(x=..., y=..., v=...), got {brief(steps)}.")


def _is_numbers(value: Any) -> bool:
    """Return whether an argument is a number, or a point of numbers."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(leaf, float | int) for leaf in leaves)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
