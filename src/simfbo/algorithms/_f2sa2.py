"""F2SA-2, the central difference for MemFBO: Chen, Li, Chayti, Zhang, "Faster Gradient Methods for
Highly-smooth Stochastic Bilevel Optimization", ICLR 2026.
"""

from simfbo.algorithms._penalty import Gradient, MemState, PenaltyMethod
from simfbo.core import trees
from simfbo.core.problem import Point, PyTree


class F2SA2(PenaltyMethod):
    """MemFBO of order 2: `base.y` and `base.v` are u- and u+, the minimisers of g -+ f/lambda."""

    def point(self, state: MemState) -> Point[PyTree]:
        return Point(state.base.x, _middle(state.base.y, state.base.v))

    def directions(self, at: Point[PyTree], grad_f: Gradient, grad_g: Gradient) -> Point[PyTree]:
        x, minus, plus = at
        (f_x, f_m), (g_x, g_m) = grad_f(x, minus), grad_g(x, minus)
        (fp_x, f_p), (gp_x, g_p) = grad_f(x, plus), grad_g(x, plus)
        d_x = trees.add_scaled(_middle(f_x, fp_x), self.penalty / 2, trees.subtract(gp_x, g_x))
        d_minus = trees.add_scaled(g_m, -1 / self.penalty, f_m)
        return Point(d_x, d_minus, trees.add_scaled(g_p, 1 / self.penalty, f_p))


def _middle(a: PyTree, b: PyTree) -> PyTree:
    return trees.scale(0.5, trees.add(a, b))
