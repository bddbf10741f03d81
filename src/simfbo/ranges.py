"""What values the settings of a method may have: annotations of its parameters.

Configurations check them. A parameter without one may have any value of its type.

Example:
    >>> def mine(problem, local, server=None, damping: Positive = 1.0): ...
"""

from typing import Annotated, NamedTuple

__all__ = ["Channels", "Count", "Fraction", "Positive", "Range"]


class Range(NamedTuple):
    """The values that a number may have.

    Attributes:
        above: it must be larger than this; None for any.
        most: it must be at most this; None for any.
    """

    above: float | None = None
    most: float | None = None


class Channels(NamedTuple):
    """The variables that have a step size of their own, in an annotation of step sizes.

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
