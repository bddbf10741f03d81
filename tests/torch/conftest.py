"""Losses in JAX against PyTorch's own: value, gradient and Hessian product of many at once.

All losses of a group are traced together, each with arguments of its own, so that one program
serves them all and a difference still has a name. Without PyTorch, nothing here is tested.
"""

import warnings
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch


@pytest.fixture(scope="session")
def differences():
    """Return the comparison of many losses."""
    return compare


def compare(cases, function, tolerance, second_order=True):
    """Return {case: what differs by more than the tolerance}.

    Args:
        cases: {case: (loss, arrays)}.
        function: all losses as one function of {case: arrays}, traced.
        tolerance: relative to the largest entry, or to one.
        second_order: whether to compare Hessian products.
    """
    given = {name: tuple(arrays) for name, (_, arrays) in cases.items()}
    ours = in_jax(function, given, second_order)
    found = {}
    for place, (name, (loss, arrays)) in enumerate(cases.items()):
        theirs = in_torch(loss, arrays, second_order)
        mine = ours[0][place], ours[1][name], ours[2][name]
        worst = [relative(a, b) for a, b in zip(mine, theirs)]
        if not np.max(worst) <= tolerance:  # NaN is larger than any number
            found[name] = worst
    return found


def direction(array):
    return np.random.default_rng(array.size).normal(size=array.shape).astype(array.dtype)


def floats(tree):
    """Return the tree's floating arrays, and the others, each with None for the rest."""
    real = [np.issubdtype(a.dtype, np.floating) for a in jax.tree.leaves(tree)]
    leaves, structure = jax.tree.flatten(tree)
    return [a if r else None for a, r in zip(leaves, real)], leaves, structure


def in_jax(function, given, second_order):
    """Return all values, and gradients and Hessian products by case."""
    variables, leaves, structure = floats(given)
    real = [i for i, a in enumerate(variables) if a is not None]

    def values(*arrays):
        filled = dict(zip(real, arrays))
        everything = [filled.get(i, leaf) for i, leaf in enumerate(leaves)]
        return function(jax.tree.unflatten(structure, everything))

    ways = tuple(jnp.asarray(direction(leaves[i])) for i in real)

    @jax.jit
    def compute(*arrays):
        """Replay the losses once for all derivatives, as SimFBO's directions do."""
        if not second_order:
            found, pull = jax.vjp(values, *arrays)
            gradient = pull(jnp.ones_like(found))
            return found, gradient, gradient
        (found, _), pull = jax.vjp(lambda *a: jax.jvp(values, a, ways), *arrays)
        one, zero = jnp.ones_like(found), jnp.zeros_like(found)
        return found, pull((one, zero)), pull((zero, one))

    found = compute(*(jnp.asarray(leaves[i]) for i in real))
    return found[0], by_case(found[1], real, structure), by_case(found[2], real, structure)


def by_case(arrays, real, structure):
    """Return {case: its arrays}."""
    filled = dict(zip(real, arrays))
    whole = jax.tree.unflatten(structure, [filled.get(i) for i in range(structure.num_leaves)])
    return {name: [a for a in parts if a is not None] for name, parts in whole.items()}


def in_torch(loss, arrays, second_order):
    """Return value, gradients and Hessian product."""
    tensors = [torch.from_numpy(np.array(a)) for a in arrays]
    tensors = [t.long() if t.dtype == torch.int32 else t for t in tensors]
    real = [t.requires_grad_() for t in tensors if t.is_floating_point()]
    kernels = torch.nn.attention
    with warnings.catch_warnings(), kernels.sdpa_kernel(kernels.SDPBackend.MATH):
        warnings.simplefilter("ignore")
        value = loss(*tensors)
        options = {"allow_unused": True, "materialize_grads": True}
        gradient = torch.autograd.grad(value, real, create_graph=True, **options)
        if not second_order:
            return value, gradient, gradient
        ways = [torch.from_numpy(direction(t.detach().numpy())) for t in real]
        slope = sum((g * way).sum() for g, way in zip(gradient, ways))
        slope = slope + 0 * sum((t * t).sum() for t in real)  # linear losses have none
        return value, gradient, torch.autograd.grad(slope, real, **options)


def relative(ours, theirs):
    """Return the largest difference, relative to the largest entry or one."""
    ours, theirs = (
        [np.asarray(a.detach().numpy(force=True) if hasattr(a, "detach") else a) for a in part]
        for part in (as_list(ours), as_list(theirs))
    )
    gaps = [0.0]
    for a, b in zip(ours, theirs):
        compared = np.where(np.isnan(b), 0.0, np.abs(a - b))  # PyTorch's NaN is nothing to be like
        gaps.append(np.max(compared, initial=0.0) / max(1.0, np.nanmax(np.abs(b), initial=0.0)))
    return np.max(gaps)


def as_list(given):
    return list(given) if isinstance(given, list | tuple) else [given]
