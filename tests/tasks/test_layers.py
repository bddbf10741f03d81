"""The layers agree with XLA's own convolution and pooling, and so do all their derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from simfbo.tasks.layers import conv2d, max_pool

Tree = tuple[jax.Array, ...]

# (batch, height, width, cin), (kh, kw, cout)
SHAPES = [
    ((3, 32, 32, 3), (5, 5, 6)),
    ((3, 14, 14, 6), (5, 5, 16)),
    ((2, 11, 7, 2), (3, 3, 4)),
    ((2, 9, 13, 1), (2, 5, 3)),
    ((1, 5, 5, 4), (5, 5, 2)),
    ((4, 6, 8, 3), (1, 1, 5)),
    ((2, 10, 12, 2), (7, 4, 1)),
    ((1, 17, 3, 20), (4, 1, 30)),
]


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape))


def _xla_conv(images: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return bias + lax.conv_general_dilated(
        images, kernel, (1, 1), "VALID", dimension_numbers=layout
    )


def _xla_pool(images: jax.Array, size: int) -> jax.Array:
    window = (1, size, size, 1)
    return lax.reduce_window(images, -jnp.inf, lax.max, window, window, "VALID")


def _arguments(shape: tuple[int, ...], kernel: tuple[int, int, int], seed: int = 0) -> Tree:
    weights = _normal(kernel[0], kernel[1], shape[3], kernel[2], seed=seed)
    return _normal(*shape, seed=seed), weights, _normal(kernel[2], seed=seed)


def _assert_close(found: object, wanted: object) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale = float(np.max(np.abs(other)))
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12 * scale)


def _hessian_products(
    loss: Callable[..., jax.Array], point: Tree, direction: Tree
) -> tuple[Tree, Tree, Tree]:
    """Return one product: reverse over forward, forward over reverse and reverse over reverse."""
    places = tuple(range(len(point)))
    grad = jax.grad(loss, places)

    def dotted(*at: jax.Array) -> jax.Array:
        return sum(
            (jnp.vdot(g, d) for g, d in zip(grad(*at), direction, strict=True)), jnp.zeros(())
        )

    def slope(*at: jax.Array) -> jax.Array:
        return jax.jvp(loss, at, direction)[1]

    forward_over_reverse = jax.jvp(grad, point, direction)[1]
    return jax.grad(slope, places)(*point), forward_over_reverse, jax.grad(dotted, places)(*point)


@pytest.mark.parametrize(("shape", "kernel"), SHAPES)
def test_conv_and_its_derivatives_equal_xla(
    shape: tuple[int, ...], kernel: tuple[int, int, int]
) -> None:
    point, direction = _arguments(shape, kernel), _arguments(shape, kernel, seed=1)

    def loss(conv: Callable[..., jax.Array], *at: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(conv(*at)))

    @jax.jit
    def ours_and_theirs(point: Tree, direction: Tree) -> tuple[Any, ...]:
        ours, theirs = functools.partial(loss, conv2d), functools.partial(loss, _xla_conv)
        grads = [jax.grad(one, (0, 1, 2)) for one in (ours, theirs)]
        products = _hessian_products(ours, point, direction)
        return (
            (conv2d(*point), grads[0](*point), *products),
            (_xla_conv(*point), *jax.jvp(grads[1], point, direction)),
        )

    (output, grad, *products), (their_output, their_grad, their_product) = ours_and_theirs(
        point, direction
    )
    _assert_close((output, grad), (their_output, their_grad))
    for product in products:
        _assert_close(product, their_product)


def test_conv_without_a_bias() -> None:
    images, weights, bias = _arguments(*SHAPES[2])
    _assert_close(conv2d(images, weights), conv2d(images, weights, bias) - bias)


@pytest.mark.parametrize(
    ("shape", "size"),
    [((2, 6, 6, 3), 1), ((2, 6, 6, 3), 2), ((3, 7, 9, 2), 2), ((3, 7, 9, 2), 3), ((1, 5, 8, 4), 3)],
)
def test_pool_equals_xla_and_drops_what_is_left_over(shape: tuple[int, ...], size: int) -> None:
    images = _normal(*shape)

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_slope(pool: Callable[[jax.Array, int], jax.Array], at: jax.Array) -> Tree:
        pooled, back = jax.vjp(lambda at: pool(at, size), at)
        return pooled, back(jnp.cos(pooled))[0]

    pooled, slope = value_and_slope(max_pool, images)
    assert pooled.shape == (shape[0], shape[1] // size, shape[2] // size, shape[3])
    _assert_close((pooled, slope), value_and_slope(_xla_pool, images))


def test_pool_second_derivatives_agree_in_all_modes() -> None:
    images, direction = _normal(2, 7, 6, 3), _normal(2, 7, 6, 3, seed=1)

    def loss(at: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(max_pool(at)))

    windows = images[:, :6].reshape(2, 3, 2, 3, 2, 3)
    largest = windows.max((2, 4), keepdims=True)
    curvature = jnp.where(windows == largest, -jnp.sin(windows), 0).reshape(2, 6, 6, 3)
    wanted = jnp.pad(curvature, ((0, 0), (0, 1), (0, 0), (0, 0))) * direction
    products = jax.jit(lambda at, along: _hessian_products(loss, (at,), (along,)))
    for product in products(images, direction):
        _assert_close(product, (wanted,))


def test_pool_gives_a_tie_to_the_first_pixel_in_every_mode() -> None:
    images = jnp.asarray([[0.0, 2.0, 1.0, 1.0], [2.0, 2.0, 1.0, 1.0]]).reshape(1, 2, 4, 1)
    wanted = jnp.asarray([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]).reshape(1, 2, 4, 1)
    _assert_close(jax.jit(jax.grad(lambda at: max_pool(at).sum()))(images), wanted)
    _assert_close(jax.jit(jax.jacfwd(lambda at: max_pool(at).sum()))(images), wanted)
    _assert_close(jax.jit(jax.grad(lambda at: _xla_pool(at, 2).sum()))(images), wanted)


def _network(conv: Callable, pool: Callable, x: Tree, y: jax.Array, images: jax.Array) -> jax.Array:
    hidden = pool(jax.nn.relu(conv(images, *x[:2])), 2)
    hidden = pool(jax.nn.relu(conv(hidden, *x[2:])), 2)
    return jnp.mean(jax.nn.logsumexp(hidden.reshape(len(images), -1) @ y, axis=-1))


@pytest.mark.usefixtures("optimised")
def test_a_network_in_a_loop_equals_xla() -> None:
    """The purpose of the layers: grad of a jvp in the head, for all layers, in a loop under jit."""
    x = (_normal(5, 5, 3, 4), _normal(4), _normal(3, 3, 4, 5), _normal(5))
    y, v = _normal(45, 10), _normal(45, 10, seed=1)
    clients = _normal(3, 2, 21, 20, 3)

    def total(conv: Callable, pool: Callable) -> tuple[Tree, jax.Array]:
        def slope(x: Tree, y: jax.Array, images: jax.Array) -> jax.Array:
            return jax.jvp(lambda head: _network(conv, pool, x, head, images), (y,), (v,))[1]

        def add(i: jax.Array, sums: tuple[Tree, jax.Array]) -> tuple[Tree, jax.Array]:
            return jax.tree.map(jnp.add, sums, jax.grad(slope, (0, 1))(x, y, clients[i]))

        zeros = jax.tree.map(jnp.zeros_like, (x, y))
        return jax.jit(lambda start: lax.fori_loop(0, 3, add, start))(zeros)

    _assert_close(total(conv2d, max_pool), total(_xla_conv, _xla_pool))


def test_layers_map_over_clients_and_kernels() -> None:
    images, weights = _normal(3, 2, 9, 8, 2), _normal(3, 3, 3, 2, 4)

    def layer(images: jax.Array, kernel: jax.Array) -> jax.Array:
        return max_pool(conv2d(images, kernel))

    alone = jax.jit(layer)
    one_by_one = np.stack([alone(i, k) for i, k in zip(images, weights, strict=True)])
    _assert_close(jax.vmap(layer)(images, weights), one_by_one)
    _assert_close(lax.map(lambda both: layer(*both), (images, weights)), one_by_one)
    last = np.moveaxis(images, 0, -1), np.moveaxis(weights, 0, -1)
    mapped = jax.jit(jax.vmap(layer, in_axes=-1, out_axes=-1))
    _assert_close(np.moveaxis(mapped(*last), -1, 0), one_by_one)


@pytest.mark.usefixtures("optimised")
def test_results_leave_jit_in_the_usual_memory_order() -> None:
    """Arrays in another order are misread by the next function under jit (JAX 0.10, CPU)."""
    images, kernel = _normal(2, 9, 8, 2), _normal(3, 3, 2, 4)
    for layer in (conv2d, jax.jit(conv2d)):
        grads = jax.grad(lambda *at, f=layer: jnp.sum(jnp.sin(f(*at))), (0, 1))(images, kernel)
        for result in (layer(images, kernel), *grads, max_pool(images)):
            order = result.format.layout.major_to_minor  # pyright: ignore[reportAttributeAccessIssue]
            assert order == (0, 1, 2, 3)


def test_layers_keep_the_dtype_and_take_numpy() -> None:
    images, kernel = np.ones((2, 6, 6, 1), np.float32), np.ones((3, 3, 1, 2), np.float32)
    pooled = max_pool(conv2d(images, kernel))  # pyright: ignore[reportArgumentType]
    assert pooled.dtype == jnp.float32
    _assert_close(pooled, np.full((2, 2, 2, 2), 9.0, np.float32))


@pytest.mark.parametrize(
    ("images", "kernel", "bias", "message"),
    [
        ((6, 6, 1), (3, 3, 1, 2), None, "Images must be"),
        ((1, 6, 6, 1), (3, 3, 2), None, "A kernel must be"),
        ((1, 6, 6, 3), (3, 3, 1, 2), None, "The images have 3 channels, but the kernel takes 1."),
        ((1, 6, 4, 1), (3, 5, 1, 2), None, "A kernel of 3 x 5 does not fit into images of 6 x 4."),
        ((1, 6, 6, 1), (3, 3, 1, 2), (1, 2), r"The bias must have shape \(2,\), not \(1, 2\)."),
    ],
)
def test_conv_rejects_shapes_that_do_not_fit(
    images: tuple[int, ...], kernel: tuple[int, ...], bias: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        conv2d(jnp.ones(images), jnp.ones(kernel), None if bias is None else jnp.ones(bias))


def test_pool_rejects_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="Images must be"):
        max_pool(jnp.ones((4, 4, 1)))
    with pytest.raises(ValueError, match=r"No window of side 3 fits into images of 2 x 4\."):
        max_pool(jnp.ones((1, 2, 4, 1)), 3)
    with pytest.raises(ValueError, match="No window of side 0"):
        max_pool(jnp.ones((1, 2, 4, 1)), 0)
