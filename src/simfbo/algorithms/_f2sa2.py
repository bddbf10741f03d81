"""F2SA-2, the central difference for MemFBO: Chen, Li, Chayti, Zhang, "Faster Gradient Methods for
Highly-smooth Stochastic Bilevel Optimization", ICLR 2026.
"""

import jax

from simfbo.algorithms._penalty import MemState, PenaltyMethod
from simfbo.core import trees
from simfbo.core.federation import Client
from simfbo.core.problem import Point, PyTree, evaluate


class F2SA2(PenaltyMethod):
    """MemFBO of order 2: `base.y` and `base.v` are u- and u+, the minimisers of g -+ f/lambda."""

    def point(self, state: MemState) -> Point[PyTree]:
        return Point(state.base.x, _middle(state.base.y, state.base.v))

    def draw(self, at: Point[PyTree], client: Client, key: jax.Array) -> Point[PyTree]:
        """Return d_x, d_- and d_+; the gradients on both sides see one batch."""
        x, minus, plus = at
        lower_key, upper_key = jax.random.split(key)
        lower, upper = client.data.lower_batch(lower_key), client.data.upper_batch(upper_key)
        grad_f = jax.grad(lambda x, y: evaluate(self.problem.upper, x, y, upper), (0, 1))
        grad_g = jax.grad(lambda x, y: evaluate(self.problem.lower, x, y, lower), (0, 1))
        (f_x, f_m), (g_x, g_m), (fp_x, f_p), (gp_x, g_p) = (
            grad_f(x, minus), grad_g(x, minus), grad_f(x, plus), grad_g(x, plus)
        )  # fmt: skip
        d_x = trees.add_scaled(_middle(f_x, fp_x), self.penalty / 2, trees.subtract(gp_x, g_x))
        d_minus = trees.add_scaled(g_m, -1 / self.penalty, f_m)
        return Point(d_x, d_minus, trees.add_scaled(g_p, 1 / self.penalty, f_p))


def _middle(a: PyTree, b: PyTree) -> PyTree:
    """Return (a + b) / 2."""
    return trees.scale(0.5, trees.add(a, b))
