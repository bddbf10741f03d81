"""Ranges of a method's settings: annotations of its parameters.

Configurations validate them. A parameter without one may have any value of its type.

Example:
    >>> def mine(problem, local, server=None, damping: Positive = 1.0): ...
"""

from typing import Annotated, NamedTuple

__all__ = ["Channels", "Count", "Fraction", "Positive", "Range"]


class Range(NamedTuple):
    """An interval of numbers.

    Attributes:
        above: the exclusive lower bound; None for none.
        most: the inclusive upper bound; None for none.
    """

    above: float | None = None
    most: float | None = None


class Channels(NamedTuple):
    """The variables with a step size of their own, in an annotation of step sizes.

    Attributes:
        names: "xyv", or "xy" for a method without v.
    """

    names: str


Positive = Annotated[float, Range(above=0.0)]
"""A positive number; not infinite."""
Fraction = Annotated[float, Range(above=0.0, most=1.0)]
"""A number above 0 and at most 1."""
Count = Annotated[int, Range(above=0, most=2**31 - 1)]
"""A whole number above 0."""
