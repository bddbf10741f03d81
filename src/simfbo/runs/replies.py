"""Replies that did not count or stood out, as lines of the history."""

from typing import Any

from simfbo.runs.files import Json


def taken_refusals(federation: Any, t: int) -> list[Json]:
    """Remove the refusals of iteration t from the federation; return them as history lines."""
    waiting = getattr(federation, "refusals", [])
    lines = [{"round": t, **one._asdict(), "reason": one.reason.value} for one in waiting]
    waiting.clear()
    return lines


def taken_suspicions(federation: Any, t: int) -> list[Json]:
    """Remove the suspicions of iteration t from the federation; return them as history lines."""
    waiting = getattr(federation, "suspicions", [])
    lines = [{"round": t, **one._asdict(), "about": one.kind} for one in waiting]
    waiting.clear()
    return [{key: line[key] for key in line if key != "kind"} for line in lines]
