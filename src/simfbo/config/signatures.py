"""Settings derived from a function's signature, for methods and tasks without a model."""

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

# Parameters that the run provides, which are not settings.
GIVEN = ("problem", "seed", "data_dir")
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_STEPS = {"xyv": StepSizes, "xy": TwoStepSizes}


def settings_of(
    factory: Callable[..., Any],
    name: str,
    base: type[MethodSettings] | type[TaskSettings],
    defaults: Mapping[str, Any] = {},
) -> type[Strict]:
    """Create a model with a field for each parameter that a configuration can set.

    A parameter of a type that TOML cannot hold keeps its default.

    Args:
        factory: the function; its parameters need defaults, except those that the run provides.
        name: of the method or task.
        base: the model's base class.
        defaults: that override those of the factory, by parameter.

    Example:
        >>> def mine(problem, steps, momentum: float = 0.9): ...
        >>> sorted(settings_of(mine, "mine", MethodSettings).model_fields)
        ['momentum', 'name', 'steps']
    """
    parameters = _parameters(factory, name)
    if (
        base is MethodSettings
        and "steps" not in parameters
        and not {"local", "server"} <= set(parameters)
    ):
        raise UserError(
            f"'{name}' must take its step sizes as (problem, local, server) or as (problem, steps)."
        )
    fields: Json = {"name": (str, name)}
    hints = _hints(factory)
    for parameter in parameters.values():
        hint = hints.get(parameter.name)
        if base is MethodSettings and parameter.name in ("local", "server", "steps"):
            field = _steps(parameter.name, hints.get("local", hint))
        else:
            default = defaults.get(parameter.name, parameter.default)
            field = _field(parameter.replace(default=default), hint, name)
        fields |= {} if field is None else {parameter.name: field}
    base = LocalAndServer if "local" in parameters and base is MethodSettings else base
    return create_model(f"Settings_of_{name.replace(':', '_')}", __base__=base, **fields)


def _parameters(factory: Callable[..., Any], name: str) -> dict[str, inspect.Parameter]:
    """Return the parameters that are settings."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have none
        raise UserError(
            f"The parameters of '{name}' cannot be read: wrap it in a function of your own."
        ) from None
    return {p.name: p for p in parameters if p.name not in GIVEN and p.kind not in _VARIABLE}


def _hints(factory: Callable[..., Any]) -> Json:
    """Return the annotated types; none if an annotation cannot be resolved."""
    try:
        return get_type_hints(factory, include_extras=True)
    except Exception:  # an annotation can be anything
        return {}


def _steps(name: str, hint: Any) -> tuple[Any, Any]:
    """Return annotation and default of a method's step sizes."""
    variables = (metadata.names for metadata in get_args(hint) if isinstance(metadata, Channels))
    model = _STEPS[next(variables, "xyv")]
    return (model | None, None) if name == "server" else (model, model())


def _field(parameter: inspect.Parameter, hint: Any, name: str) -> tuple[Any, Any] | None:
    """Return annotation and default of a setting; None if a configuration cannot hold it."""
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
    """Return the type of a setting, with "none" for a missing value."""
    if default is None:
        return Annotated[Any if hint is None else _checked(hint) | None, Absent]
    kind = type(default) if hint is None else _checked(hint)
    return Annotated[kind, Absent] if NoneType in get_args(kind) else kind


def _checked(hint: Any) -> Any:
    """Convert the ranges in a type to pydantic's."""
    if get_origin(hint) in (UnionType, Union):
        return Union[tuple(map(_checked, get_args(hint)))]  # noqa: UP007
    kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    for constraint in metadata:
        if isinstance(constraint, Range):
            constraint = Field(
                gt=constraint.above,
                le=constraint.most,
                allow_inf_nan=False if kind is float else None,
            )
        kind = Annotated[kind, constraint]
    return kind


def _is_plain(kind: Any, default: Any) -> bool:
    """Check whether values of a type can be written to a file and read again."""
    try:
        adapter = TypeAdapter(kind, config=Strict.model_config)
        adapter.validate_python(adapter.dump_python(default, mode="json"))
    except Exception:  # the type may be a user's
        return False
    return True
