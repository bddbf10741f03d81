"""How far the hypergradient of `FederatedMLPClassifier` is from the true one.

    python benchmarks/tabular/hypergradient.py

Networks of four tanh units on synthetic rows (a product of two of three features decides), two
folds. The lower problem is solved exactly; the true hypergradient is that of finite differences.
Prints the angle between both, and its cosine, for some numbers of rows, floors and seeds.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.optimize import minimize

from simfbo.tasks import _regularisation as regularisation
from simfbo.tasks._perceptron import form

STEP = 1e-3


def angle(rows: int, floor: float, seed: int) -> float:
    """Return the angle in degrees."""
    rng, kind = np.random.default_rng(seed), form((4,), True)
    features = rng.normal(size=(rows, 3))
    labels = features[:, 0] * features[:, 1] + 0.3 * rng.normal(size=rows) > 0
    batch = jnp.asarray(features), jnp.asarray(labels, "i4"), jnp.arange(rows, dtype="i4") % 2
    problem = regularisation.problem(2, 2, floor, form=kind)
    x, model = kind.start(3, 2, floor, seed)
    stack = jax.tree.map(lambda a: jnp.stack([jnp.asarray(a, float)] * 2), model)
    start, back = ravel_pytree(stack)
    lower = jax.jit(jax.value_and_grad(lambda y, x: problem.lower(x, back(y), batch)))
    upper = jax.jit(lambda x, y: problem.upper(x, back(y), batch))

    def solved(x, y):
        options = {"gtol": 1e-9, "maxiter": 20_000}
        return minimize(lambda y: tuple(map(np.asarray, lower(y, x))), y, jac=True,
                        options=options).x  # fmt: skip

    x = np.asarray(x, float)
    y = solved(x, start)
    moved = [[float(upper(z, solved(z, y))) for z in (x + e, x - e)] for e in STEP * np.eye(len(x))]
    true = np.array([(up - down) / (2 * STEP) for up, down in moved])
    hessian = jax.hessian(lambda y: lower(y, x)[0])(y)
    v = np.linalg.solve(hessian, jax.grad(upper, 1)(x, y))
    ours = np.asarray(jax.grad(upper)(x, y) - jax.jacobian(lambda x: lower(y, x)[1])(x).T @ v)
    cosine = ours @ true / np.linalg.norm(ours) / np.linalg.norm(true)
    return float(np.degrees(np.arccos(np.clip(cosine, -1, 1))))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for rows in (40, 160):
        for floor in (1e-3, 1e-2):
            angles = [angle(rows, floor, seed) for seed in range(8)]
            print(f"{rows} rows, floor {floor:g}: median {np.median(angles):.0f} degrees; "
                  f"{', '.join(f'{one:.0f}' for one in sorted(angles))}", flush=True)  # fmt: skip
