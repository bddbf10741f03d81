"""Settings derived from a function's signature, for methods and tasks without a model of them."""

import inspect
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import Field, TypeAdapter, create_model

from simfbo.config.fields import (
    Absent,
    LocalAndServer,
    MethodSettings,
    StepSizes,
    Strict,
    TaskSettings,
    TwoStepSizes,
)
from simfbo.errors import UserError
from simfbo.ranges import Channels, Range
from simfbo.runs.files import Json

# Parameters that are not settings: they come from the run.
GIVEN = ("problem", "seed", "data_dir")
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_STEPS = {"xyv": StepSizes, "xy": TwoStepSizes}


def settings_of(
    factory: Callable[..., Any],
    name: str,
    base: type[MethodSettings] | type[TaskSettings],
    defaults: Mapping[str, Any] = {},
) -> type[Strict]:
    """Return a model with a field for each parameter that a configuration can set.

    A parameter of a type that TOML cannot hold keeps its default.

    Args:
        factory: whose parameters; each needs a default, except those that the run gives.
        name: of the method or task.
        base: what the model derives from.
        defaults: in place of those of the factory, by parameter.

    Example:
        >>> def mine(problem, steps, momentum: float = 0.9): ...
        >>> sorted(settings_of(mine, "mine", MethodSettings).model_fields)
        ['momentum', 'name', 'steps']
    """
    found = _parameters(factory, name)
    if base is MethodSettings and "steps" not in found and not {"local", "server"} <= set(found):
        raise UserError(
            f"'{name}' must take its step sizes as (problem, local, server) or as (problem, steps)."
        )
    fields: Json = {"name": (str, name)}
    hints = _hints(factory)
    for parameter in found.values():
        hint = hints.get(parameter.name)
        if base is MethodSettings and parameter.name in ("local", "server", "steps"):
            own = _steps(parameter.name, hints.get("local", hint))
        else:
            default = defaults.get(parameter.name, parameter.default)
            own = _field(parameter.replace(default=default), hint, name)
        fields |= {} if own is None else {parameter.name: own}
    base = LocalAndServer if "local" in found and base is MethodSettings else base
    return create_model(f"Settings_of_{name.replace(':', '_')}", __base__=base, **fields)


def _parameters(factory: Callable[..., Any], name: str) -> dict[str, inspect.Parameter]:
    """Return the parameters that the run does not give."""
    try:
        found = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have none
        raise UserError(
            f"The parameters of '{name}' cannot be read: wrap it in a function of your own."
        ) from None
    return {one.name: one for one in found if one.name not in GIVEN and one.kind not in _VARIABLE}


def _hints(factory: Callable[..., Any]) -> Json:
    """Return the annotated types; none where an annotation cannot be resolved."""
    try:
        return get_type_hints(factory, include_extras=True)
    except Exception:  # an annotation can be anything
        return {}


def _steps(name: str, hint: Any) -> tuple[Any, Any]:
    """Return annotation and default of the step sizes of a method."""
    given = (of.names for of in get_args(hint) if isinstance(of, Channels))
    model = _STEPS[next(given, "xyv")]
    return (model | None, None) if name == "server" else (model, model())


def _field(parameter: inspect.Parameter, hint: Any, name: str) -> tuple[Any, Any] | None:
    """Return annotation and default of one setting; None if a configuration cannot hold it."""
    default = parameter.default
    if default is inspect.Parameter.empty:
        raise UserError(
            f"'{name}' needs a default for '{parameter.name}': it is called without that argument."
        )
    kind = _kind(hint, default)
    reserved = parameter.name == "name" or hasattr(Strict, parameter.name)
    if reserved or parameter.name.startswith("_") or not _is_plain(kind, default):
        return None
    return kind, default


def _kind(hint: Any, default: Any) -> Any:
    """Return the type of a setting; TOML has no null, so "none" stands for it."""
    if default is None:
        return Annotated[Any if hint is None else _checked(hint) | None, Absent]
    kind = type(default) if hint is None else _checked(hint)
    return Annotated[kind, Absent] if NoneType in get_args(kind) else kind


def _checked(hint: Any) -> Any:
    """Return a type whose ranges pydantic checks."""
    if get_origin(hint) in (UnionType, Union):
        return Union[tuple(map(_checked, get_args(hint)))]  # noqa: UP007
    kind, *found = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    for one in found:
        if isinstance(one, Range):
            one = Field(gt=one.above, le=one.most, allow_inf_nan=False if kind is float else None)
        kind = Annotated[kind, one]
    return kind


def _is_plain(kind: Any, default: Any) -> bool:
    """Return whether values of a type survive being written to a file and read again."""
    try:
        adapter = TypeAdapter(kind, config=Strict.model_config)
        adapter.validate_python(adapter.dump_python(default, mode="json"))
    except Exception:  # the type can be anybody's
        return False
    return True
