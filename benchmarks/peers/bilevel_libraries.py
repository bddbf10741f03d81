"""One bilevel step of the perceptron with libraries for bilevel problems on one machine (n = 1).

None of them has SimFBO's single loop, in which v is a variable; each step here is the cheapest that
the library offers: one SGD step on y from where the last one ended, then the hypergradient, then
one SGD step on x. The hypergradient comes from

    torchopt-unrolled   TorchOpt: through the one step on y
    torchopt-implicit   TorchOpt: implicit differentiation, `custom_root` with 5 steps of its CG
    jaxopt-implicit     JAXopt: implicit differentiation, `custom_root` with 5 steps of its CG,
                        compiled with jax.jit

Both lower gradients and all products use the same lower batch of 64, f an upper batch of 64.
"""

from collections.abc import Callable
from typing import Any

from problems import STEPS, Case, Rounds, setting

CG_STEPS = 5
STEP_X = 1e-4  # g is barely convex, so implicit hypergradients from five steps of CG are large


def torchopt_unrolled(case: Case) -> Rounds:
    """Return the rounds with a hypergradient through the lower step."""
    import torch
    import torchopt

    (upper, lower), draw, start, step_y = _torch_problem(case)

    def one(x: tuple, y: tuple) -> tuple[tuple, tuple]:
        train, validation = draw()
        x, y = _leaves(x), _leaves(y)
        optimiser = torchopt.FuncOptimizer(torchopt.sgd(lr=step_y))
        moved = optimiser.step(lower(x, y, train), y)
        h = torch.autograd.grad(upper(x, moved, validation), x)
        return _descend(x, h, STEP_X), tuple(leaf.detach() for leaf in moved)

    return _repeat(one, start)


def torchopt_implicit(case: Case) -> Rounds:
    """Return the rounds with an implicit hypergradient."""
    import torch
    from torchopt.diff.implicit import custom_root
    from torchopt.linear_solve import solve_cg

    (upper, lower), draw, start, step_y = _torch_problem(case)

    def optimality(y: tuple, x: tuple, batch: tuple) -> tuple:
        return torch.func.grad(lower, 1)(x, y, batch)

    @custom_root(optimality, argnums=1, solve=solve_cg(maxiter=CG_STEPS))
    def solve(y: tuple, x: tuple, batch: tuple) -> tuple:
        y = _leaves(y)
        with torch.enable_grad():
            d_y = torch.autograd.grad(lower(x, y, batch), y)
        return _descend(y, d_y, step_y)

    def one(x: tuple, y: tuple) -> tuple[tuple, tuple]:
        train, validation = draw()
        x = _leaves(x)
        moved = solve(y, x, train)
        h = torch.autograd.grad(upper(x, moved, validation), x)
        return _descend(x, h, STEP_X), tuple(leaf.detach() for leaf in moved)

    return _repeat(one, start)


def jaxopt_implicit(case: Case) -> Rounds:
    """Return the rounds with an implicit hypergradient, all in one compiled loop."""
    from functools import partial

    import jax
    from jaxopt.implicit_diff import custom_root
    from jaxopt.linear_solve import solve_cg
    from soba import batches

    problem, data, x0, y0, _ = setting(case)
    lower_batch, upper_batch = batches(data.lower), batches(data.upper)
    step_y = STEPS["mlp"][1]

    def optimality(y: Any, x: Any, batch: Any) -> Any:
        return jax.grad(problem.lower, 1)(x, y, batch)

    @custom_root(optimality, solve=partial(solve_cg, maxiter=CG_STEPS))
    def solve(y: Any, x: Any, batch: Any) -> Any:
        return jax.tree.map(lambda a, d: a - step_y * d, y, optimality(y, x, batch))

    def one(point: Any, key: jax.Array) -> tuple[Any, None]:
        x, y = point
        train, validation = lower_batch(key), upper_batch(jax.random.fold_in(key, 1))

        def outer(x: Any) -> tuple[jax.Array, Any]:
            moved = solve(y, x, train)
            return problem.upper(x, moved, validation), moved

        h, moved = jax.grad(outer, has_aux=True)(x)
        return (jax.tree.map(lambda a, d: a - STEP_X * d, x, h), moved), None

    @partial(jax.jit, static_argnums=0)
    def program(count: int) -> Any:
        return jax.lax.scan(one, (x0, y0), jax.random.split(jax.random.key(0), count))[0]

    return lambda count: jax.block_until_ready(program(count))


def _torch_problem(case: Case) -> tuple[Any, Callable, tuple, float]:
    """Return (f, g), the draw of (lower, upper) batches, the start (x, y) and y's step size."""
    from torch_clients import network

    losses, draw, (x, y, _) = network(case)

    def one_client() -> tuple:
        return tuple(tuple(leaf[0] for leaf in batch) for batch in draw())

    return losses, one_client, (x, y), STEPS["mlp"][1]


def _leaves(params: tuple) -> tuple:
    return tuple(leaf.detach().requires_grad_() for leaf in params)


def _descend(params: tuple, gradient: tuple, step: float) -> tuple:
    return tuple((a - step * d).detach() for a, d in zip(params, gradient, strict=True))


def _repeat(one: Callable, start: tuple) -> Rounds:
    """Return the function that applies a step on (x, y) a number of times."""

    def rounds(count: int) -> tuple:
        point = start
        for _ in range(count):
            point = one(*point)
        return point

    return rounds
