"""MimeFBO: one communication round per iteration, like SimFBO, without client drift.

Mime (Karimireddy et al. 2021) for the three variables of SimFBO. To our knowledge it has not been
published elsewhere; docs/reference-mimefbo.md has the proof that its fixed point is exact.
"""

from typing import ClassVar, Literal, get_args

import jax
import jax.numpy as jnp

from simfbo.algorithms._common import Server, add_scaled, scale
from simfbo.algorithms._corrected import CorrectedLoop, MimeState, mean_direction
from simfbo.algorithms._scaffoldfbo import ScaffoldFBO
from simfbo.algorithms._stormfbo import StormFBO
from simfbo.core import BilevelProblem, Client, Federation, Method, Point, client_step
from simfbo.core.problem import PyTree
from simfbo.errors import UserError
from simfbo.ranges import Fraction, Positive

Control = Literal["mean", "storm", "memory"]


class MimeFBO(CorrectedLoop):
    """MimeFBO, whose h is a moving average of m; `mimefbo` has the equations."""

    residuals: ClassVar = {"mimefbo_step": "xyv"}

    def round(self, state: MimeState, federation: Federation, key: jax.Array) -> MimeState:
        cohort = federation.cohort(key)
        m, norm = federation.sum(self.mimefbo_step, (self.point(state), state.h), cohort, key)
        h = add_scaled(scale(1 - self.theta, state.h), self.theta, m)
        return self.advance(state, m, norm, federation, cohort, key)._replace(h=h)

    @client_step
    def mimefbo_step(self, payload: PyTree, client: Client) -> tuple[Point[PyTree], jax.Array]:
        """Send m_i, the mean of the directions along the corrected path, and ||a_i||_1."""
        z, h = payload
        m = mean_direction(self.draw, z, h, client, self.local)
        return m, jnp.asarray(client.plan.norm)


def mimefbo(
    problem: BilevelProblem,
    local: Point[float],
    server: Server | None = None,
    radius: Positive | None = None,
    control: Control = "mean",
    theta: Fraction = 1.0,
) -> Method:
    """MimeFBO: exact at any local step size and for unequal local work; arguments as for `simfbo`.

    With z = (x, y, v) and D_i(z; xi) SimFBO's three directions, client i takes tau_i steps from z,

        z_i -= eta [D_i(z_i; xi) - D_i(z; xi) + h],     m_i = mean of D_i(z_i; xi) over the steps

    by its local rule, with the weights a_k of that rule in the mean,
    and the server steps along m = sum_C p~_i m_i, with step sizes rho gamma (see `shrofbo`).
    At the solution h is zero and the two D_i cancel, so that all local steps and m are zero.

    Args:
        problem: the two losses.
        local: eta, the clients' step sizes.
        server: gamma, as step sizes or Optax transformations; the same as `local` by default.
        radius: r of the projection of v on the server; None for no projection.
        control: the control variate h. "mean": a moving average of m. "storm": h and m are the same
            STORM estimate, which also uses the directions at the previous iterate; it removes most
            of the noise of client sampling. "memory": SCAFFOLD, with stateful clients: c_i, the
            client's last m_i, replaces D_i(z; xi), h is the mean of all c_i, and the server steps
            along h + sum_C p~_i (m_i - c_i).
        theta: the weight of new directions in h, between 0 and 1; not used by "memory".

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = mimefbo(quadratic().problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    """
    if control not in get_args(Control):
        raise UserError(f"control must be one of {', '.join(get_args(Control))}, got '{control}'.")
    kinds = {"mean": MimeFBO, "storm": StormFBO, "memory": ScaffoldFBO}
    gamma = local if server is None else server
    return kinds[control](problem, local, gamma, radius, theta=theta)
