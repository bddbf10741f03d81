"""What a client step costs, counted in its trace: the same on every machine."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple


class Cost(NamedTuple):
    """What one client's step costs; of a loop over local steps, one turn.

    Attributes:
        operations: multiplications and additions.
        numbers: that it writes.
    """

    operations: int = 0
    numbers: int = 0

    def plus(self, other: "Cost", times: int = 1) -> "Cost":
        """Add another cost, some number of times; space is used again."""
        return Cost(self.operations + times * other.operations, self.numbers + other.numbers)


def cost_of(jaxpr: Any) -> Cost:
    """Count the operations of a trace and the numbers that it writes."""
    total = Cost()
    for eqn in jaxpr.eqns:
        written = sum(
            math.prod(var.aval.shape) for var in eqn.outvars if hasattr(var.aval, "shape")
        )
        inner = [cost_of(part) for part in _inside(eqn.params)]
        if not inner:
            total = total.plus(Cost(_operations(eqn, written), written))
        for part in inner:
            total = total.plus(part, eqn.params.get("length", 1))
    return total


def _operations(eqn: Any, written: int) -> int:
    """Return the operations of one primitive."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * written * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        return 2 * written * math.prod(kernel) // max(1, kernel[features])
    return written


def _inside(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the traces that a primitive holds."""
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            closed = getattr(part, "jaxpr", part)
            if hasattr(closed, "eqns"):
                yield closed
