"""Lenient notation: whole numbers such as 1e3, and names in any case."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from simfbo.config.messages import models_in


def normalised(model: type[BaseModel], values: Any) -> Any:
    """Convert whole floats to integers and names to the case of the model's.

    Ambiguous values are left to the validation.

    Args:
        model: the model that validates the settings.
        values: a table of settings.
    """
    if not isinstance(values, dict):
        return values
    fields = model.model_fields
    return {
        key: _normalised_value(fields[key].annotation, value) if key in fields else value
        for key, value in values.items()
    }


def _normalised_value(annotation: Any, value: Any) -> Any:
    if isinstance(value, dict):
        inner = list(models_in(annotation))
        return normalised(inner[0], value) if len(inner) == 1 else value
    if isinstance(value, list):
        return [_normalised_value(annotation, item) for item in value]
    kinds = set(_leaves(annotation))
    if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
        return int(value)
    if isinstance(value, str) and value not in kinds and value.lower() in kinds:
        return value.lower()
    return value


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types and literal values of an annotation."""
    args = get_args(annotation)
    if get_origin(annotation) is Literal:
        yield from args
    elif get_origin(annotation) is Annotated:
        yield from _leaves(args[0])
    elif args:
        for part in args:
            yield from _leaves(part)
    elif isinstance(annotation, type):
        yield annotation
