"""Types that PyTorch does not mix."""

import jax

from simfbo.errors import UserError


def require_same_type(a: jax.Array, b: jax.Array) -> None:
    """Raise unless two factors have one dtype, as PyTorch does."""
    if a.dtype != b.dtype:
        raise UserError(
            f"A product of {a.dtype} and {b.dtype} is none in PyTorch: convert one of them, for "
            "example with .float()."
        )
