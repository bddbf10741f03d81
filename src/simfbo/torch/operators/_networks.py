"""Layers of networks: products, normalisation, attention, embeddings, recurrence."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from simfbo.errors import UserError
from simfbo.torch.operators._types import require_same_type


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a b; reject operands of different types like PyTorch."""
    require_same_type(a, b)
    return a @ b


def addmm(
    c: jax.Array, a: jax.Array, b: jax.Array, *, beta: float = 1, alpha: float = 1
) -> jax.Array:
    """Return beta c + alpha a b."""
    out = product(a, b) if alpha == 1 else alpha * product(a, b)
    return out if beta == 0 else out + (c if beta == 1 else beta * c)


def linear(a: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Return a weight^T + bias."""
    out = product(a, weight.T)
    return out if bias is None else out + bias


def bilinear(
    a: jax.Array, b: jax.Array, weight: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """Return a^T weight_o b + bias_o for every output o."""
    out = jnp.einsum("...i,oij,...j->...o", a, weight, b)
    return out if bias is None else out + bias


def layer_norm(
    a: jax.Array, shape: Sequence[int], weight: jax.Array | None, bias: jax.Array | None, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise over the last axes."""
    out, mean, rstd = _normalised(a, tuple(range(a.ndim - len(shape), a.ndim)), eps)
    return _affine(out, weight, bias), mean, rstd


def group_norm(
    a: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    batch: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise over groups of channels."""
    out, mean, rstd = _normalised(a.reshape(batch, groups, -1), (2,), eps)
    out = _affine(out.reshape(a.shape), *_per_channel(a, weight, bias))
    return out, mean[..., 0], rstd[..., 0]


def batch_norm(
    a: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    variance: jax.Array,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise by stored means and variances: batch normalisation in evaluation mode."""
    mean, factor = _per_channel(a, mean, lax.rsqrt(variance + eps))
    out = _affine((a - mean) * factor, *_per_channel(a, weight, bias))
    return out, jnp.zeros(0, a.dtype), jnp.zeros(0, a.dtype)


def own_norm(
    a: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise by the input's own moments, as instance normalisation does."""
    out, mean, rstd = _normalised(a, (0, *range(2, a.ndim)), eps)
    out = _affine(out, *_per_channel(a, weight, bias))
    return out, mean.ravel(), rstd.ravel()


def _normalised(
    a: jax.Array, axes: tuple[int, ...], eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    mean = a.mean(axes, keepdims=True)
    centred = a - mean
    rstd = lax.rsqrt((centred * centred).mean(axes, keepdims=True) + eps)
    return centred * rstd, mean, rstd


def _affine(a: jax.Array, weight: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    a = a if weight is None else a * weight
    return a if bias is None else a + bias


def _per_channel(a: jax.Array, *parameters: jax.Array | None) -> list[Any]:
    shape = (1, -1, *(1,) * (a.ndim - 2))
    return [None if part is None else part.reshape(shape) for part in parameters]


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """Return softmax(scale query key^T + mask) value; a fully masked row is zero."""
    if dropout:
        raise UserError("Attention drops weights at random: call .eval() on the module.")
    if enable_gqa:
        key, value = (jnp.repeat(a, query.shape[-3] // a.shape[-3], -3) for a in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.swapaxes(-1, -2)
    if is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if mask is None:
        return jax.nn.softmax(scores, -1) @ value
    if mask.dtype != bool:
        scores, mask = scores + mask, mask > -jnp.inf
    visible = jnp.broadcast_to(mask, scores.shape)
    weights = jax.nn.softmax(scores, -1, where=visible)
    return jnp.where(visible, weights, 0.0) @ value


def embedding(
    table: jax.Array,
    index: jax.Array,
    padding: int = -1,
    by_frequency: bool = False,
    sparse: bool = False,
) -> jax.Array:
    """Return rows of a table; the padding row has no derivative."""
    if by_frequency:
        raise UserError("Embeddings with scale_grad_by_freq have no derivative: leave it out.")
    return _rows(table, index, padding)


def _rows(table: jax.Array, index: jax.Array, padding: int) -> jax.Array:
    rows = table[index]
    if padding < 0:
        return rows
    return jnp.where((index == padding)[..., None], lax.stop_gradient(rows), rows)


def embedding_bag(
    table: jax.Array,
    index: jax.Array,
    offsets: jax.Array,
    by_frequency: bool,
    mode: int,
    sparse: bool,
    weights: jax.Array | None,
    include_last_offset: bool,
    padding: int | None = None,
) -> tuple[jax.Array, None, None, None]:
    """Return the sum (mode 0), mean (1) or maximum (2) of the rows in each bag."""
    if index.ndim != 1 or by_frequency or mode == 2:
        raise UserError("Embedding bags are sums or means of rows, without scale_grad_by_freq.")
    bags = len(offsets) - include_last_offset
    owner = jnp.searchsorted(offsets[:bags], jnp.arange(len(index)), side="right") - 1
    counted = jnp.ones(len(index), bool) if padding is None else index != padding % len(table)
    rows = jnp.where(counted[:, None], table[index], 0.0)
    rows = rows if weights is None else rows * weights[:, None]
    total = jax.ops.segment_sum(rows, owner, bags)
    if mode == 1:
        count = jax.ops.segment_sum(counted.astype(table.dtype), owner, bags)
        total = total / jnp.maximum(count, 1)[:, None]
    return total, None, None, None


def cholesky(a: jax.Array, *, upper: bool = False) -> jax.Array:
    """Return the triangular factor; like PyTorch, read one triangle and differentiate for both."""
    triangle = jnp.triu(a) if upper else jnp.tril(a)
    symmetric = triangle + triangle.swapaxes(-1, -2) - jnp.eye(a.shape[-1], dtype=a.dtype) * a
    even = (a + a.swapaxes(-1, -2)) / 2
    lower = lax.linalg.cholesky(lax.stop_gradient(symmetric - even) + even, symmetrize_input=False)
    return lower.swapaxes(-1, -2) if upper else lower


def logdet(a: jax.Array) -> jax.Array:
    """Return the logarithm of a determinant; NaN if it is negative."""
    sign, value = jnp.linalg.slogdet(a)
    return jnp.where(sign < 0, jnp.nan, value)


def solve(a: jax.Array, b: jax.Array, *, left: bool = True) -> jax.Array:
    """Return the solution x of a x = b or, from the right, x a = b."""
    if not left:
        return solve(a.swapaxes(-1, -2), b.swapaxes(-1, -2)).swapaxes(-1, -2)
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    return jnp.linalg.solve(a, b[..., None])[..., 0] if vector else jnp.linalg.solve(a, b)


def _lstm_cell(state: Any, inputs: jax.Array, back: Callable[[jax.Array], jax.Array]) -> Any:
    h, c = state
    i, f, g, o = jnp.split(inputs + back(h), 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru_cell(state: Any, inputs: jax.Array, back: Callable[[jax.Array], jax.Array]) -> Any:
    (h,) = state
    (r, z, n), (r_back, z_back, n_back) = (jnp.split(a, 3, -1) for a in (inputs, back(h)))
    z = jax.nn.sigmoid(z + z_back)
    n = jnp.tanh(n + jax.nn.sigmoid(r + r_back) * n_back)
    return (n + z * (h - n),)


def _plain_cell(activate: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    return lambda state, inputs, back: (activate(inputs + back(state[0])),)


def recurrent(cell: Callable[..., Any], states: int) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a recurrent network of one or more layers, optionally bidirectional, as scans."""

    def network(
        a: jax.Array,
        start: Any,
        weights: Sequence[jax.Array],
        biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[jax.Array, ...]:
        if dropout and train:
            raise UserError("A recurrent layer drops values at random: call .eval() on it.")
        directions, weights_each = 1 + bidirectional, 4 if biases else 2
        if len(weights) != layers * directions * weights_each:
            raise UserError(
                "Recurrent layers with proj_size have no JAX counterpart: leave it out."
            )
        a = a.swapaxes(0, 1) if batch_first else a
        first = start if states > 1 else (start,)
        ends = []
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                index = layer * directions + direction
                cell_weights = weights[index * weights_each : (index + 1) * weights_each]
                state = tuple(part[index] for part in first)
                end, out = _scan(cell, a, state, cell_weights, backwards=direction == 1)
                ends.append(end)
                outputs.append(out)
            a = jnp.concatenate(outputs, -1)
        finals = (jnp.stack(parts) for parts in zip(*ends, strict=True))
        return (a.swapaxes(0, 1) if batch_first else a), *finals

    return network


def _scan(
    cell: Callable[..., Any],
    a: jax.Array,
    state: Any,
    weights: Sequence[jax.Array],
    backwards: bool,
) -> tuple[Any, jax.Array]:
    """Run one layer in one direction; return the last state and all outputs."""
    inward, back, *biases = weights
    inputs = linear(a, inward, biases[0] if biases else None)

    def step(state: Any, inputs: jax.Array) -> tuple[Any, jax.Array]:
        state = cell(state, inputs, lambda h: linear(h, back, biases[1] if biases else None))
        return state, state[0]

    return lax.scan(step, state, inputs, reverse=backwards)


NETWORKS = {
    "_native_batch_norm_legit": own_norm, "_native_batch_norm_legit_no_training": batch_norm,
    "addmm": addmm, "bilinear": bilinear, "bmm": product,
    "embedding": embedding, "embedding_bag": embedding_bag, "gru": recurrent(_gru_cell, 1),
    "linalg_cholesky": cholesky, "linalg_inv": jnp.linalg.inv,
    "linalg_slogdet": lambda a: tuple(jnp.linalg.slogdet(a)), "linalg_solve": solve,
    "logdet": logdet, "linear": linear,
    "lstm": recurrent(_lstm_cell, 2), "mm": product, "native_group_norm": group_norm,
    "native_layer_norm": layer_norm, "rnn_relu": recurrent(_plain_cell(jax.nn.relu), 1),
    "rnn_tanh": recurrent(_plain_cell(jnp.tanh), 1), "scaled_dot_product_attention": attention,
}  # fmt: skip
"""Layers of networks, by name."""

KEPT = (
    "bilinear",
    "binary_cross_entropy",
    "detach",
    "embedding_bag",
    "gru",
    "hardsigmoid",
    "hardswish",
    "huber_loss",
    "linalg_cholesky",
    "linalg_inv",
    "linalg_slogdet",
    "linalg_solve",
    "linear",
    "log_sigmoid_forward",
    "logdet",
    "lstm",
    "rnn_relu",
    "rnn_tanh",
    "scaled_dot_product_attention",
    "sinc",
    "smooth_l1_loss",
    "std",
    "unfold",
)
"""Operators that are replayed as a whole, which PyTorch would decompose."""
