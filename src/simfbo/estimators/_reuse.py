"""Compiled training that is used again by fits of the same shapes, as in a grid search.

To compile takes seconds, to train a small model less than one. A federation keeps its programs, so
a few federations are kept here, without their data, each for one problem and one shape of data.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from simfbo.algorithms._auto_steps import automatic, size_of
from simfbo.algorithms._simfbo import Steps, simfbo
from simfbo.core.data import FederatedData, federate
from simfbo.core.federation import Algorithm, Ledger
from simfbo.core.local_work import constant
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.core.sampling import everyone, without_replacement
from simfbo.diagnostics import pooled
from simfbo.engines.simulated import SimulatedFederation

_MOST = 16
_KEPT: OrderedDict[Hashable, Any] = OrderedDict()


class Recipe(NamedTuple):
    """All that a training depends on beside the data.

    Attributes:
        build: (*settings) -> the two losses.
        settings: numbers and tuples of them.
        rounds: of the training.
        steps: the step sizes; None to find them.
        cohort: how many clients take part in a round; None for all.
        local_steps: of each client.
    """

    build: Callable[..., BilevelProblem]
    settings: tuple[Hashable, ...]
    rounds: int
    steps: Steps | None
    cohort: int | None
    local_steps: int


class Workshop(NamedTuple):
    """Where a training takes place.

    Attributes:
        federation: with the data of one fit at a time.
        method: what it runs.
        upper: (data, state) -> the upper loss over all clients.
    """

    federation: SimulatedFederation
    method: Algorithm
    upper: Callable[[FederatedData, Any], float]


@contextmanager
def lend(
    key: Hashable, make: Callable[[], Any], data: FederatedData, ledger: Ledger
) -> Iterator[Any]:
    """Return what was kept under the key, or is made now, with this data and ledger.

    Meanwhile it is not kept, so that every fit has its own, in whatever thread.
    """
    found = _KEPT.pop(key, None) or make()
    federation = getattr(found, "federation", found)
    federation.data, federation.ledger = data, ledger
    yield found
    federation.data = nothing()
    _KEPT[key] = found
    if len(_KEPT) > _MOST:
        _KEPT.popitem(last=False)


def workshop(
    recipe: Recipe, data: FederatedData, start: tuple[PyTree, PyTree], ledger: Ledger
) -> Any:
    """Return the context in which a recipe is run on some data, compiled where it was before."""
    scale = tuple(jax.tree.leaves(size_of(start[0])))
    key = recipe, scale, form((data.lower, data.upper, start))
    return lend(key, lambda: _workshop(recipe, data, start[0]), data, ledger)


def form(tree: PyTree) -> Hashable:
    """Return what programs for arrays like these depend on."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def nothing() -> FederatedData:
    """Return the data of a federation that is not in use."""
    row = [np.zeros(1, np.int32)]
    return federate(np.zeros(1, np.float32), row, row)


def _workshop(recipe: Recipe, data: FederatedData, x0: PyTree) -> Workshop:
    """Return a new one."""
    problem = recipe.build(*recipe.settings)
    sampler = everyone() if recipe.cohort is None else without_replacement(recipe.cohort)
    federation = SimulatedFederation(data, sampler, constant(recipe.local_steps))
    total = jax.jit(lambda part, p, x, y: pooled(problem.upper, part, p)(x, y))

    def upper(data: FederatedData, state: Any) -> float:
        return float(total(data.upper, data.p, state.x, state.y))

    return Workshop(federation, _method(problem, recipe, x0), upper)


def _method(problem: BilevelProblem, recipe: Recipe, x0: PyTree) -> Algorithm:
    """Return SimFBO, with the steps that are given or its own."""
    if recipe.steps is not None:
        return simfbo(problem, recipe.steps)
    return automatic(
        lambda plan: simfbo(problem, plan.local, plan.server), problem, x0, recipe.rounds
    )
