"""Elementwise functions, with PyTorch's values and derivatives, also at kinks.

Types are converted when a loss is traced: the arguments here have a common dtype.
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
    """Return a / b, optionally rounded down or towards zero."""
    if rounding_mode is None:
        return a / b
    down = a // b
    if rounding_mode == "floor":
        return down
    if jnp.issubdtype(jnp.result_type(down), jnp.floating):
        return jnp.trunc(a / b)
    return jnp.where((a % b != 0) & ((a < 0) != (b < 0)), down + 1, down)


def power(a: Any, b: Any) -> jax.Array:
    """Return a^b; integer exponents have derivatives at zero too."""
    if isinstance(b, float) and b.is_integer() and abs(b) < 2**31:
        b = int(b)
    if isinstance(b, int) and b < 0:
        return 1 / a**-b
    if isinstance(b, int):
        return a**b
    if isinstance(b, float):
        return jnp.power(a, b)
    flat = (a == 0) & ((b == 0) | (b == 1))  # the derivatives of a general power are NaN here
    powers = jnp.power(jnp.where(flat, 1.0, a), b)
    return jnp.where(flat, jnp.where(b == 0, 1.0, a), powers).astype(powers.dtype)


def where(mask: Any, a: Any, b: Any) -> jax.Array:
    """Return a where the mask is true, else b."""
    return jnp.where(mask, a, b)


def absolute(a: jax.Array) -> jax.Array:
    """Return |a|, with derivative 0 at 0 (jnp.abs has 1)."""
    return jnp.sign(a) * a


def fmax(a: Any, b: Any) -> jax.Array:
    """Return the larger number, the first of equal ones, ignoring a single NaN."""
    return jnp.where((a >= b) | jnp.isnan(b), a, b)


def fmin(a: Any, b: Any) -> jax.Array:
    """Return the smaller number, the first of equal ones, ignoring a single NaN."""
    return jnp.where((a <= b) | jnp.isnan(b), a, b)


def hardsigmoid(a: jax.Array) -> jax.Array:
    """Return a/6 + 1/2 between 0 and 1, with derivative 0 on the bounds."""
    return jnp.where(a <= -3, 0.0, jnp.where(a >= 3, 1.0, a / 6 + 0.5))


def hardswish(a: jax.Array) -> jax.Array:
    """Return a hardsigmoid(a)."""
    return jnp.where(a <= -3, 0.0, jnp.where(a >= 3, a, a * (a + 3) / 6))


def sinc(a: jax.Array) -> jax.Array:
    """Return sin(pi a) / (pi a), and 1 at 0, with derivative 0."""
    angle = jnp.where(a == 0, 1.0, a) * jnp.pi
    return jnp.where(a == 0, 1.0, jnp.sin(angle) / angle)


def relu(a: jax.Array) -> jax.Array:
    """Return max(a, 0), with derivative 0 at 0."""
    return jnp.where(a > 0, a, jnp.zeros((), a.dtype))


def clamp(a: jax.Array, low: Any = None, high: Any = None) -> jax.Array:
    """Limit a to two bounds, with derivative 1 on them."""
    if low is not None:
        a = jnp.where(a < low, low, a)
    return a if high is None else jnp.where(a > high, high, a)


def hardtanh(a: jax.Array, low: Number = -1.0, high: Number = 1.0) -> jax.Array:
    """Limit a to two bounds, with derivative 0 on them."""
    return jnp.where(a <= low, low, jnp.where(a >= high, high, a)).astype(a.dtype)


def elu(
    a: jax.Array, alpha: Number = 1.0, scale: Number = 1.0, input_scale: Number = 1.0
) -> jax.Array:
    """Return scale a for positive a, scale alpha (exp(input_scale a) - 1) otherwise."""
    low = jnp.where(a > 0, 0.0, a)  # large values would overflow and make the derivative NaN
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
    "abs": absolute, "acos": jnp.arccos, "acosh": jnp.arccosh, "add": add, "asin": jnp.arcsin,
    "asinh": jnp.arcsinh, "atan": jnp.arctan, "atan2": jnp.arctan2, "atanh": jnp.arctanh,
    "bitwise_and": jnp.bitwise_and, "bitwise_not": jnp.bitwise_not, "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor, "ceil": jnp.ceil, "clamp": clamp, "copysign": jnp.copysign,
    "cos": jnp.cos, "cosh": jnp.cosh, "digamma": jax.scipy.special.digamma, "div": divide,
    "elu": elu, "eq": operator.eq, "erf": lax.erf, "erfc": lax.erfc, "erfinv": lax.erf_inv,
    "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1, "floor": jnp.floor, "fmax": fmax,
    "fmin": fmin, "fmod": jnp.fmod, "ge": operator.ge, "gelu": gelu, "gt": operator.gt,
    "hardsigmoid": hardsigmoid, "hardswish": hardswish, "hardtanh": hardtanh,
    "hypot": jnp.hypot, "isinf": jnp.isinf, "isnan": jnp.isnan,
    "le": operator.le, "leaky_relu": leaky_relu, "lgamma": lax.lgamma, "log": jnp.log,
    "log10": jnp.log10, "log1p": jnp.log1p, "log2": jnp.log2,
    "logical_and": jnp.logical_and, "logical_not": jnp.logical_not, "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor, "lt": operator.lt, "maximum": jnp.maximum,
    "minimum": jnp.minimum, "mul": operator.mul, "ne": operator.ne, "neg": operator.neg,
    "pow": power, "reciprocal": jnp.reciprocal, "relu": relu, "remainder": jnp.remainder,
    "round": rounded, "rsqrt": lax.rsqrt, "sigmoid": jax.nn.sigmoid, "sign": jnp.sign,
    "sin": jnp.sin, "sinc": sinc, "sinh": jnp.sinh, "sqrt": jnp.sqrt, "sub": subtract,
    "tan": jnp.tan, "tanh": jnp.tanh, "trunc": jnp.trunc, "where": where,
}  # fmt: skip
"""Operators whose array arguments have a common type, by name."""
