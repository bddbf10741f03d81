"""Checks of types that PyTorch does not mix."""

import jax

from simfbo.errors import UserError


def require_same_type(a: jax.Array, b: jax.Array) -> None:
    """Raise unless two factors have the same dtype, like PyTorch."""
    if a.dtype != b.dtype:
        raise UserError(
            f"PyTorch does not multiply {a.dtype} by {b.dtype}: convert one of them, for "
            "example with .float()."
        )
