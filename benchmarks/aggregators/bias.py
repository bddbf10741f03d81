"""Where SimFBO ends among honest clients: random quadratics, whose solution is known."""

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rules import CENTRES, RULES, Rules, everywhere

from simfbo import Point, SimulatedFederation, run
from simfbo.algorithms import simfbo
from simfbo.core.data import ClientData
from simfbo.core.federation import Client
from simfbo.core.local_work import constant
from simfbo.core.sampling import Cohort
from simfbo.robust.aggregation import combine
from simfbo.tasks._quadratic import PROBLEM, Quadratic, random_quadratic

HETEROGENEITY, PROBLEMS, MANY = (0.0, 0.3, 1.0, 3.0), range(10), (20, 80, 320)
METHOD = simfbo(PROBLEM, Point(x=0.1, y=0.2, v=0.2))
KEY = jax.random.key(0)  # nothing is drawn: everyone takes part, with all its data


class Traced:
    """Everyone at once, so that a whole run is one compiled loop; as far as SimFBO needs it."""

    def __init__(self, data: ClientData, n: int, rules: Rules) -> None:
        """Hold the data of n clients."""
        self.data, self.n, self.rules = data, n, rules

    def cohort(self, key: jax.Array) -> Cohort:
        """Return everyone."""
        return Cohort(np.arange(self.n), np.full(self.n, 1 / self.n))

    def sum(self, client_step: Any, payload: Any, cohort: Cohort, key: Any, eta: Any) -> Any:
        """Return the messages combined."""
        plan = constant(1)(key, 1)[0]

        def message(i: Any) -> Any:
            return client_step(payload, Client(self.data._replace(client=i), plan, eta, key))

        messages = jax.vmap(message)(jnp.arange(self.n))
        return combine(self.rules, messages, cohort.weights)


@partial(jax.jit, static_argnums=(1, 2))
def iterate(data: ClientData, n: int, rules: Rules, state: Any, rounds: Any) -> Any:
    """Return the state after so many rounds."""
    federation: Any = Traced(data, n, rules)
    return jax.lax.fori_loop(0, rounds, lambda t, s: METHOD.round(s, federation, KEY), state)


def random(kind: str, clients: int, heterogeneity: float, seed: int) -> Quadratic:
    """Return random clients.

    Args:
        kind: "normal", the library's own; "skewed", where c, t and s scatter exponentially in place
            of normally, with the same mean and variance; "shifts", where nothing but c, t and s
            differs, so that the clients' messages are symmetric about their mean.
        clients: how many.
        heterogeneity: how much they differ.
        seed: of the draw.
    """
    problem = random_quadratic(clients, heterogeneity=heterogeneity, seed=seed)
    if kind == "normal":
        return problem
    centre = random_quadratic(clients, heterogeneity=0.0, seed=seed)
    if kind == "shifts":
        return centre._replace(c=problem.c, t=problem.t, s=problem.s)
    rng = np.random.default_rng([7, seed])
    scatter = {n: rng.exponential(size=getattr(centre, n).shape) - 1 for n in "cts"}
    own = {n: getattr(centre, n) + heterogeneity * scatter[n] for n in "cts"}
    return problem._replace(**own)


def limit(problem: Quadratic, rules: Rules, rounds: int = 2000) -> float:
    """Return the distance from x* after so many rounds, when nothing moves any more."""
    task = problem.task()
    n, data = task.data.n, task.data.client(0)
    state = iterate(data, n, rules, METHOD.init(task.x0, task.y0), rounds)
    after = iterate(data, n, rules, state, 1)
    moved = max(float(jnp.linalg.norm(after[j] - state[j])) for j in range(3))
    if not moved < 1e-6:
        print(f"A round still moves by {moved:.1g}.", file=sys.stderr)
    return task.evaluate(state)["x_error"]


def limits(kind: str, n: int, h: float, rules: Rules, seeds: Any = PROBLEMS) -> list[float]:
    """Return the distances on several problems."""
    return [limit(random(kind, n, h, seed), rules) for seed in seeds]


def agree(names: list[str]) -> None:
    """Raise unless the compiled loop takes the library's own rounds."""
    task = random_quadratic(20, heterogeneity=1.0).task()
    for name in names:
        federation = SimulatedFederation(task.data, aggregators=everywhere(name))
        theirs = run(METHOD, federation, task.x0, task.y0, rounds=5).state
        start = METHOD.init(task.x0, task.y0)
        ours = iterate(task.data.client(0), 20, everywhere(name), start, 5)
        np.testing.assert_allclose(ours.x, theirs.x, rtol=1e-9)


def size(h: float) -> list[float]:
    """Return ||x*|| of the problems, to compare with."""
    found = (random("normal", 20, h, seed).closed_form().x() for seed in PROBLEMS)
    return [float(np.linalg.norm(x)) for x in found]


def by_heterogeneity(kind: str, names: list[str]) -> dict[str, Any]:
    """Return the distances by aggregator and heterogeneity."""
    return {
        name: {f"{h:g}": limits(kind, 20, h, everywhere(name)) for h in HETEROGENEITY}
        for name in names
    }


def centres() -> dict[str, Any]:
    """Return the distances with the aggregators that move a centre."""
    with jax.enable_x64(True):
        agree(list(CENTRES))
        return {kind: by_heterogeneity(kind, list(CENTRES)) for kind in ("normal", "skewed")}


def measure() -> dict[str, Any]:
    """Return all distances, problem by problem."""
    robust = [name for name in RULES if name != "mean"]
    with jax.enable_x64(True):
        agree(list(RULES))
        return {
            "size": {f"{h:g}": size(h) for h in HETEROGENEITY},
            **{kind: by_heterogeneity(kind, list(RULES)) for kind in ("normal", "skewed")},
            "one channel": {
                name: {c: limits("normal", 20, 1.0, Point(**{c: RULES[name]})) for c in "xyv"}
                for name in robust
            },
            "median of many": {
                kind: {str(n): limits(kind, n, 1.0, everywhere("median"), range(5)) for n in MANY}
                for kind in ("shifts", "normal", "skewed")
            },
        }
