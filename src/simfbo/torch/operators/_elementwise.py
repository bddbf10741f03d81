"""Functions of single numbers: the value and the derivative are PyTorch's, also where it kinks.

PyTorch's types are settled when a loss is traced: what arrives here has one dtype already.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Number = int | float | bool


def add(a: Any, b: Any, *, alpha: Number = 1) -> jax.Array:
    """Return a + alpha b."""
    return a + (b if alpha == 1 else alpha * b)


def subtract(a: Any, b: Any, *, alpha: Number = 1) -> jax.Array:
    """Return a - alpha b."""
    return a - (b if alpha == 1 else alpha * b)


def divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> jax.Array:
    """Return a / b, rounded down or towards zero if asked to."""
    if rounding_mode is None:
        return a / b
    if rounding_mode == "floor":
        return a // b
    return jnp.trunc(a / b).astype(jnp.result_type(a, b))


def power(a: Any, b: Any) -> jax.Array:
    """Return a^b; whole exponents have derivatives at zero too."""
    if isinstance(b, float) and b.is_integer() and abs(b) < 2**31:
        b = int(b)
    if isinstance(b, int) and b < 0:
        return 1 / a**-b
    return a**b if isinstance(b, int) else jnp.power(a, b)


def where(mask: Any, a: Any, b: Any) -> jax.Array:
    """Return a where the mask is true, else b."""
    return jnp.where(mask, a, b)


def relu(a: jax.Array) -> jax.Array:
    """Return max(a, 0), of derivative 0 at 0."""
    return jnp.where(a > 0, a, jnp.zeros((), a.dtype))


def clamp(a: jax.Array, low: Any = None, high: Any = None) -> jax.Array:
    """Return a between two bounds, of derivative 1 on them."""
    if low is not None:
        a = jnp.where(a < low, low, a)
    return a if high is None else jnp.where(a > high, high, a)


def hardtanh(a: jax.Array, low: Number = -1.0, high: Number = 1.0) -> jax.Array:
    """Return a between two bounds, of derivative 0 on them."""
    return jnp.where(a <= low, low, jnp.where(a >= high, high, a)).astype(a.dtype)


def elu(
    a: jax.Array, alpha: Number = 1.0, scale: Number = 1.0, input_scale: Number = 1.0
) -> jax.Array:
    """Return scale a for positive a, scale alpha (exp(input_scale a) - 1) otherwise."""
    low = jnp.where(a > 0, 0.0, a)  # large values would overflow, and make the derivative NaN
    return scale * jnp.where(a > 0, a, alpha * jnp.expm1(low * input_scale))


def leaky_relu(a: jax.Array, slope: Number = 0.01) -> jax.Array:
    """Return a for positive a, slope a otherwise."""
    return jnp.where(a > 0, a, slope * a)


def gelu(a: jax.Array, *, approximate: str = "none") -> jax.Array:
    """Return a Phi(a), exactly or by the tanh formula."""
    return jax.nn.gelu(a, approximate=approximate == "tanh")


def rounded(a: jax.Array, *, decimals: int = 0) -> jax.Array:
    """Return a rounded, halves to even."""
    return jnp.round(a, decimals)


ELEMENTWISE = {
    "abs": jnp.abs, "acos": jnp.arccos, "acosh": jnp.arccosh, "add": add, "asin": jnp.arcsin,
    "asinh": jnp.arcsinh, "atan": jnp.arctan, "atan2": jnp.arctan2, "atanh": jnp.arctanh,
    "bitwise_and": jnp.bitwise_and, "bitwise_not": jnp.bitwise_not, "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor, "ceil": jnp.ceil, "clamp": clamp, "copysign": jnp.copysign,
    "cos": jnp.cos, "cosh": jnp.cosh, "digamma": jax.scipy.special.digamma, "div": divide,
    "elu": elu, "eq": operator.eq, "erf": lax.erf, "erfc": lax.erfc, "erfinv": lax.erf_inv,
    "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1, "floor": jnp.floor, "fmax": jnp.fmax,
    "fmin": jnp.fmin, "fmod": jnp.fmod, "ge": operator.ge, "gelu": gelu, "gt": operator.gt,
    "hardtanh": hardtanh, "hypot": jnp.hypot, "isinf": jnp.isinf, "isnan": jnp.isnan,
    "le": operator.le, "leaky_relu": leaky_relu, "lgamma": lax.lgamma, "log": jnp.log,
    "log10": jnp.log10, "log1p": jnp.log1p, "log2": jnp.log2,
    "logical_and": jnp.logical_and, "logical_not": jnp.logical_not, "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor, "lt": operator.lt, "maximum": jnp.maximum,
    "minimum": jnp.minimum, "mul": operator.mul, "ne": operator.ne, "neg": operator.neg,
    "pow": power, "reciprocal": jnp.reciprocal, "relu": relu, "remainder": jnp.remainder,
    "round": rounded, "rsqrt": lax.rsqrt, "sigmoid": jax.nn.sigmoid, "sign": jnp.sign,
    "sin": jnp.sin, "sinh": jnp.sinh, "sqrt": jnp.sqrt, "sub": subtract,
    "tan": jnp.tan, "tanh": jnp.tanh, "trunc": jnp.trunc, "where": where,
}  # fmt: skip
"""Operators whose array arguments take part in one type, by name."""
