"""What nodes receive and send: keys, sums, and the payload that all nodes share."""

import jax
import numpy as np
import pytest

from simfbo import UserError, algorithms, run
from simfbo.core import sampling
from simfbo.core.problem import Point
from simfbo.core.sampling import Cohort
from simfbo.flower import app as adapter
from simfbo.flower.app import FlowerFederation
from simfbo.privacy import Privacy, private
from simfbo.tasks import quadratic

TASK = quadratic(clients=6, samples=5, noise=0.3, batch_size=2, seed=1)
METHOD = algorithms.simfbo(TASK.problem, Point(x=0.05, y=0.1, v=0.1))
NODES = 3


def test_secret_clients_draw_for_themselves_and_get_no_key(flower):
    plan = flower.deployed(TASK, METHOD, secret=True)
    states = []
    for _ in range(2):
        grid = flower.Grid(plan, flower.parts(NODES))
        federation = FlowerFederation(grid, plan, poll=0.0)
        federation.connect()
        states.append(run(METHOD, federation, TASK.x0, TASK.y0, rounds=3).state.x)
        sent = [adapter._package(message.content) for message in grid.sent]
        assert not any("key" in package.arrays for package in sent)
    assert not np.array_equal(*states)


def test_secret_cohorts_and_noise_cannot_be_drawn_again(flower):
    task = quadratic(clients=40)
    quiet = algorithms.simfbo(task.problem, Point(x=0.0, y=0.0, v=0.0), Point(x=1.0, y=1.0, v=1.0))
    noisy = private(quiet, Privacy(noise=Point(1.0, 1.0, 1.0)))
    found = {}
    for secret in (False, True):
        plan = flower.deployed(task, noisy, secret=secret, sampler=sampling.without_replacement(20))
        federation = FlowerFederation(flower.Grid(plan, flower.parts(1)), plan, poll=0.0)
        federation.connect()
        key = jax.random.key(3)
        cohorts = [federation.cohort(key).ids for _ in range(2)]
        everyone = Cohort(np.arange(40), np.full(40, 1 / 40))
        start = noisy.init(task.x0, task.y0)
        federation.cohort = lambda key, everyone=everyone: everyone
        rounds = [noisy.round(start, federation, key).x for _ in range(2)]
        found[secret] = np.array_equal(*cohorts), np.array_equal(*rounds)
    assert found == {False: (True, True), True: (False, False)}


def test_partial_sums_reveal_no_single_message(flower):
    plan = flower.deployed(TASK, METHOD, partial_sums=True)
    grid, replies = flower.Grid(plan, flower.parts(NODES)), []
    grid.spoil = lambda node, message, reply: replies.append(reply) or reply
    federation = FlowerFederation(grid, plan, poll=0.0)
    federation.connect()
    run(METHOD, federation, TASK.x0, TASK.y0, rounds=1)
    packages = [adapter._package(reply.content) for reply in replies[NODES:]]  # after the hellos
    assert [package.arrays["message.x"].shape for package in packages] == [(4,)] * NODES


def test_the_common_payload_is_one_object_for_all_nodes(flower, single_precision):
    task = quadratic(clients=6, dim_x=60, dim_y=80, samples=2)
    task = task._replace(x0=np.zeros((60,), "float32"))
    method = algorithms.simfbo(task.problem, Point(x=0.1, y=0.1, v=0.1))
    plan = flower.deployed(task, method, sampler=sampling.everyone())
    grid = flower.Grid(plan, flower.parts(NODES))
    federation = FlowerFederation(grid, plan, poll=0.0)
    federation.connect()
    adapter._SMALL, small = 100, adapter._SMALL
    try:
        run(method, federation, task.x0, task.y0, rounds=1)
    finally:
        adapter._SMALL = small
    numbers = {m.content["common"].object_id for m in grid.sent if "common" in m.content}
    assert len(numbers) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"p": [1.0, 2.0]}, "The weights p must be 6 positive numbers"),
        ({"p": [0.0] * 6}, "The weights p must be 6 positive numbers"),
        ({"clients": 0}, "The weights p must be 0 positive numbers"),
    ],
)
def test_a_deployment_that_cannot_be(flower, options, sentence):
    plan = flower.deployed(TASK, METHOD)._replace(**options)
    with pytest.raises(UserError, match=sentence):
        FlowerFederation(flower.Grid(plan, {}), plan)
