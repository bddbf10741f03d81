"""Settings of codecs: texts by direction and channel."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from simfbo.config.fields import Strict
from simfbo.errors import brief

# The codecs by name, with the types of their arguments.
FAMILY: dict[str, tuple[type[int] | type[float], ...]] = {
    "float32": (),
    "bfloat16": (),
    "dithered": (float,),
    "eden": (int,),
    "lowrank": (int, float),
    "random_subset": (float,),
    "top_k": (float,),
}
_START = "relative_to_start"
PRESETS = {
    "small": {
        "up": {"x": "lowrank(32, 0.3)", "y": "dithered(0.5)", "v": "dithered(1)"},
        "down": {
            "x": f"{_START}(lowrank(56, 0.4))",
            "y": f"{_START}(dithered(0.25))",
            "v": "dithered(1)",
        },
    },
}


class Spec(Strict):
    """A parsed codec: name, numbers, and whether it is relative to the start."""

    name: str
    numbers: tuple[int | float, ...]
    relative: bool = False


def parse(text: str) -> Spec | None:
    """Parse the text of a codec; None for "none".

    Example:
        >>> parse("relative_to_start(lowrank(32, 0.3))").numbers
        (32, 0.3)
    """
    if text.strip() == "none":
        return None
    inner = re.fullmatch(rf"\s*{_START}\s*\((.*)\)\s*", text)
    match = re.fullmatch(r"(\w+)(?:\s*\(([^()]*)\))?", (inner[1] if inner else text).strip())
    if match is None or match[1] not in FAMILY:
        raise ValueError(f"use {', '.join(map(_example, FAMILY))} or none")
    name, arguments = match[1], (match[2] or "").strip()
    words, kinds = (
        [word.strip() for word in arguments.split(",")] if arguments else [],
        FAMILY[name],
    )
    try:
        numbers = tuple(kind(word) for kind, word in zip(kinds, words, strict=True))
    except ValueError:
        raise ValueError(f"{name} is written {_example(name)}") from None
    if any(not 0 < number < 1e6 for number in numbers):
        raise ValueError("its numbers must be positive")
    return Spec(name=name, numbers=numbers, relative=inner is not None)


def _example(name: str) -> str:
    examples = {"eden": "2", "lowrank": "32, 0.3", "dithered": "0.5"}
    return name if not FAMILY[name] else f"{name}({examples.get(name, '0.1')})"


def _checked(text: str) -> str:
    parse(text)
    return text


CodecText = Annotated[str, AfterValidator(_checked)]


class ChannelCodecs(Strict):
    """A codec for each channel."""

    x: CodecText = "none"
    y: CodecText = "none"
    v: CodecText = "none"


class CodecsConfig(Strict):
    """Codecs for both directions, or a preset; single channels of a preset can be replaced.

    `codecs = "small"` is short for `codecs.preset = "small"`.
    """

    preset: Literal["small"] | None = None
    up: ChannelCodecs = ChannelCodecs()
    down: ChannelCodecs = ChannelCodecs()

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: object) -> object:
        values = {"preset": values} if isinstance(values, str) else values
        if not isinstance(values, dict) or values.get("preset") not in PRESETS:
            return values
        preset = PRESETS[values["preset"]]
        merged = {
            direction: {**preset[direction], **given}
            for direction in preset
            if isinstance(given := values.get(direction, {}), dict)
        }
        return {**values, **merged}

    @model_validator(mode="after")
    def _only_down(self) -> "CodecsConfig":
        for text in (self.up.x, self.up.y, self.up.v):
            if (spec := parse(text)) is not None and spec.relative:
                raise ValueError(
                    f"{_START} is for payloads (down), since clients send changes, which have no "
                    f"start; got {brief(text)}"
                )
        return self
