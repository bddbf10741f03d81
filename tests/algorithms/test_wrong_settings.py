"""Settings that no method can work with are refused in one sentence."""

import jax
import numpy as np
import pytest

from simfbo import Point, SimulatedFederation
from simfbo.algorithms import aggitd, fedbio, fedbioacc, fedmbo, fedmsa, fednest, lfednest, memfbo
from simfbo.core.local_work import constant, momentum
from simfbo.errors import UserError
from simfbo.tasks import random_quadratic

TASK = random_quadratic(5, 3, 4, seed=1).task()
STEPS = Point(x=0.1, y=0.2, v=0.15)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: fednest(p, STEPS, 0), "lower_rounds must be at least 1, got 0."),
        (lambda p: fednest(p, STEPS, mode="as_released", drawn=True), "series is always summed"),
        (lambda p: fedmbo(p, STEPS, mode="x"), "must be one of paper, as_released, got 'x'"),
        (lambda p: fedmbo(p, STEPS, 1, 0), "neumann_terms must be at least 1, got 0."),
        (lambda p: memfbo(p, STEPS, order=3), "The order must be 1 or 2, got 3."),
        (lambda p: memfbo(p, STEPS, penalty=0.0), "The penalty must be a positive number, got 0"),
    ],
)
def test_wrong_settings(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make(TASK.problem)


@pytest.mark.parametrize("factory", [fednest, lfednest, aggitd, fedbio, fedmsa, fedbioacc])
def test_local_momentum_is_refused_where_it_would_be_ignored(factory):
    federation = SimulatedFederation(TASK.data, local_work=constant(2, momentum(0.5)))
    algorithm = factory(TASK.problem, STEPS)
    state = algorithm.init(np.ones(3), np.ones(4))
    with pytest.raises(UserError, match="takes plain local steps"):
        algorithm.round(state, federation, jax.random.key(0))
