"""Networks with learnt L2 weights: exact gradients, Gauss and Newton's second derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from simfbo.tasks._perceptron import form, network, scaled
from simfbo.tasks.linear import losses

RNG = np.random.default_rng(0)
ROWS, FLOOR = 12, 1e-3
FEATURES = RNG.normal(size=(ROWS, 3))
LABELS = (FEATURES[:, 0] * FEATURES[:, 1] + 0.3 * RNG.normal(size=ROWS) > 0).astype(np.int32)


@pytest.fixture(scope="module", params=[True, False], ids=["features", "layers"])
def case(request):
    """Return the form, x, flat parameters of one network, and what takes them back."""
    kind = form((3,), request.param)
    x0, model = kind.start(3, 2, FLOOR, 0)
    flat, back = ravel_pytree(jax.tree.map(lambda a: jnp.asarray(a, float), model))
    return kind, jnp.asarray(x0, float) + 0.1 * RNG.normal(size=len(x0)), flat, back


def test_values_and_gradients_are_the_network_s(case):
    kind, x, flat, back = case

    def loss(x, y, exact):
        model = back(y)
        found = network(scaled(x, model), FEATURES) if exact else kind.outputs(x, model, FEATURES)
        return losses(found, LABELS, 2).mean()

    ours, wanted = (
        jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)(x, flat, exact)
        for exact in (False, True)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), ours, wanted
    )


def test_second_derivatives_are_those_of_gauss_and_newton(case):
    """J' H J of the weights s u, by Jacobians, for both variables at once."""
    kind, x, flat, back = case
    both, apart = ravel_pytree((x, flat))

    def weights(z):
        x, y = apart(z)
        return ravel_pytree(scaled(x, back(y)))[0]

    def outputs(w):
        return network(back(w), FEATURES)

    def loss(found):
        return losses(found, LABELS, 2).mean()

    def ours(z):
        x, y = apart(z)
        return loss(kind.outputs(x, back(y), FEATURES))

    @jax.jit
    def by_hand(z):
        w = weights(z)
        J, H = jax.jacobian(outputs)(w), jax.hessian(loss)(outputs(w))
        inner = jnp.einsum("nca,ncmd,mdb->ab", J, H, J)
        T, pull = jax.jacobian(weights)(z), jnp.einsum("nca,nc->a", J, jax.grad(loss)(outputs(w)))
        return T.T @ inner @ T + jnp.einsum("a,aij->ij", pull, jax.hessian(weights)(z))

    found = jax.jit(jax.hessian(ours))(both)
    np.testing.assert_allclose(found, by_hand(both), rtol=1e-9, atol=1e-12)
    own = len(x)
    assert np.linalg.eigvalsh(found[own:, own:])[0] > -1e-12
    exact = jax.jit(jax.hessian(lambda z: loss(outputs(weights(z)))))(both)
    assert np.linalg.eigvalsh(exact[own:, own:])[0] < -1e-3
