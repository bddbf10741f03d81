"""JAX counterparts of PyTorch's operators, in one table by operator name.

Nothing here needs PyTorch, so a saved graph runs where it is not installed.
"""

from collections.abc import Callable
from typing import Any

from simfbo.torch.operators._convolutions import CONVOLUTIONS
from simfbo.torch.operators._elementwise import ELEMENTWISE
from simfbo.torch.operators._losses import LOSSES
from simfbo.torch.operators._networks import KEPT, NETWORKS
from simfbo.torch.operators._reductions import REDUCTIONS
from simfbo.torch.operators._shapes import SHAPES

__all__ = ["ELEMENTWISE", "KEPT", "TABLE"]

TABLE: dict[str, Callable[..., Any]] = {
    **ELEMENTWISE,
    **REDUCTIONS,
    **SHAPES,
    **CONVOLUTIONS,
    **NETWORKS,
    **LOSSES,
    "getitem": lambda parts, place: parts[place],
}
"""Every operator with a counterpart in JAX, by name."""
