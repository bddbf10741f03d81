"""A run is resumed with the data and the numbers that it was started with, and no others."""

import subprocess
import sys
from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from functional import Functional

from simfbo import Point, SimulatedFederation
from simfbo.algorithms import fedavg, fednest, simfbo
from simfbo.core.data import federate, from_clients
from simfbo.core.gate import Gate
from simfbo.core.local_work import constant, fixed, momentum
from simfbo.core.problem import BilevelProblem
from simfbo.core.sampling import without_replacement
from simfbo.errors import UserError
from simfbo.privacy import Privacy, private
from simfbo.robust.aggregation import trimmed_mean
from simfbo.runs.describe import describe
from simfbo.runs.inputs import inputs_of
from simfbo.runs.runner import run
from simfbo.tasks import quadratic

TASK = quadratic(clients=3, dim_x=2, dim_y=2, samples=4, seed=1)
OTHER = quadratic(clients=3, dim_x=2, dim_y=2, samples=4, seed=2)
STEPS = Point(x=0.1, y=0.2, v=0.3)


class Stop(BaseException):
    """What a kill looks like from within."""


def go(directory, algorithm, federation, **options):
    """Run an algorithm without its rounds: nothing is computed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(algorithm), "round", lambda self, state, federation, key: state)
        return run(algorithm, federation, TASK.x0, TASK.y0, rounds=3, directory=directory,
                   checkpoint_seconds=0.0, **options)  # fmt: skip


def stop(t, record):
    if t == 1:
        raise Stop


def begun(directory, algorithm=None, federation=None):
    """Start a run that is killed in its first round."""
    algorithm = simfbo(TASK.problem, STEPS) if algorithm is None else algorithm
    federation = SimulatedFederation(TASK.data) if federation is None else federation
    with pytest.raises(Stop):
        go(directory, algorithm, federation, on_round=stop)


def refusal(directory, algorithm=None, federation=None):
    """Return the sentence with which another run is refused in the folder."""
    algorithm = simfbo(TASK.problem, STEPS) if algorithm is None else algorithm
    federation = SimulatedFederation(TASK.data) if federation is None else federation
    before = {path: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(UserError) as caught:
        go(directory, algorithm, federation, resume=True)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    start, end = f"The run in {directory} was started with other ", ": resume it with the same, or "
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith(f"{end}choose another folder.")
    return str(caught.value).removeprefix(start).partition(end)[0]


def test_other_data(tmp_path):
    begun(tmp_path)
    assert refusal(tmp_path, federation=SimulatedFederation(OTHER.data)) == "data"


def rule(step, decay=0.9):
    return Point(0.1, optax.chain(optax.trace(decay), optax.scale(-step)), 0.3)


@pytest.mark.parametrize(
    ("then", "now", "sentence"),
    [
        (simfbo(TASK.problem, STEPS), simfbo(TASK.problem, STEPS._replace(y=0.4)),
         "local.y 0.2, now 0.4, server.sizes.y 0.2, now 0.4"),
        (simfbo(TASK.problem, STEPS), simfbo(TASK.problem, STEPS, radius=5.0),
         "radius None, now 5.0"),
        (simfbo(TASK.problem, STEPS), simfbo(TASK.problem, STEPS, STEPS._replace(x=1.0)),
         "server.sizes.x 0.1, now 1.0"),
        (simfbo(TASK.problem, STEPS, rule(0.1)), simfbo(TASK.problem, STEPS, rule(0.2)),
         "server.rules.y.update.update_fns.1.tx.update.step_size -0.1, now -0.2"),
        (simfbo(TASK.problem, STEPS, rule(0.1)), simfbo(TASK.problem, STEPS, rule(0.1, 0.5)),
         "server.rules.y.update.update_fns.0.tx.update.decay 0.9, now 0.5"),
        (fednest(TASK.problem, STEPS), fednest(TASK.problem, STEPS, mode="as_released"),
         "class FedNest, now ReleasedFedNest"),
        (fedavg(TASK.problem, 0.1), fedavg(TASK.problem, 0.3),
         "local 0.1, now 0.3, server.size 0.1, now 0.3"),
        (private(simfbo(TASK.problem, STEPS), Privacy()),
         private(simfbo(TASK.problem, STEPS), Privacy(noise=Point(1.0, 2.0, 1.0))),
         "privacy.noise.y 1.0, now 2.0"),
    ],
)  # fmt: skip
def test_other_numbers_of_the_algorithm(tmp_path, then, now, sentence):
    begun(tmp_path, then)
    assert refusal(tmp_path, now) == f"settings of the algorithm ({sentence})"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sampler": without_replacement(2)}, "sampler sample, now"),
        ({"local_work": fixed([1, 2, 1])}, "local_work.draw"),
        ({"local_work": constant(1, momentum(0.5))}, "local_work.rules.momentum 0.0, now 0.5"),
        ({"gate": Gate(max_norm=3.0)}, "gate.max_norm None, now 3.0"),
        ({"aggregators": Point(y=trimmed_mean(0.2))}, "aggregators.y None, now"),
    ],
)
def test_other_numbers_of_the_federation(tmp_path, options, sentence):
    begun(tmp_path)
    found = refusal(tmp_path, federation=SimulatedFederation(TASK.data, **options))
    assert found.startswith("settings of the federation (")
    assert sentence.split(" ")[0] in found


def test_the_same_again_is_resumed(tmp_path):
    """Also when all objects were made anew."""
    steps = Point(0.1, optax.adam(0.1), 0.3)
    begun(tmp_path, simfbo(TASK.problem, STEPS, steps))
    again = simfbo(TASK.problem, STEPS, Point(0.1, optax.adam(0.1), 0.3))
    copy = quadratic(clients=3, dim_x=2, dim_y=2, samples=4, seed=1)
    federation = SimulatedFederation(copy.data)
    assert go(tmp_path, again, federation, resume=True).end == {"status": "finished"}


def test_what_does_not_tell_is_not_compared():
    """As a federation of one's own."""
    found = inputs_of(simfbo(TASK.problem, STEPS), object())
    assert (found["data"], found["federation"]) == (None, {})


def test_another_version_may_describe_it_otherwise(tmp_path, monkeypatch):
    begun(tmp_path)
    other = simfbo(TASK.problem, STEPS._replace(y=0.4))
    monkeypatch.setattr("simfbo.runs.beginnings.versions", lambda: {"optax": "99"})
    with (
        pytest.warns(
            UserWarning, match=r"\(local\.y 0\.2, now 0\.4, .*\), or its version describes"
        ),
        pytest.warns(UserWarning, match="another version of optax"),
    ):
        go(tmp_path, other, SimulatedFederation(TASK.data), resume=True)


def test_own_methods_can_tell_too():
    class Mine(Functional):
        often: int = eqx.field(static=True, default=3)

    found = inputs_of(Mine("mine", Point, Point), object())["algorithm"]
    assert (found["class"], found["often"]) == ("Mine", 3)


def loss(weight):
    scale = np.array([weight, 1.0])
    return lambda x, y, batch: jnp.sum(scale * y) * weight


def test_what_a_description_sees():
    cache, count = {}, 3

    def function(x, size=2, *, rate=0.5):
        return cache, count, "path", function

    found = describe({"f": function, "n": float("nan"), "i": np.int32(4), "l": [1, {"a": 2.0}]})
    assert found == {"f": "function", "f.size": 2, "f.rate": 0.5, "f.count": 3,
                     "f.function": "function", "n": "nan", "i": 4, "l.0": 1,
                     "l.1.a": 2.0}  # fmt: skip
    cache["more"] = 1  # what changes in a run is no part of it
    assert describe({"f": function})["f.count"] == 3
    a, b = (describe({"problem": BilevelProblem(loss(w), loss(w))}) for w in (1.0, 2.0))
    assert {key for key in a if a[key] != b[key]} == {
        f"problem.{part}.{name}" for part in ("upper", "lower") for name in ("scale", "weight")
    }
    assert describe({"o": object()}) == {"o": "object"}


def test_a_description_is_the_same_in_every_process():
    script = (
        "import json, optax; from simfbo import Point; from simfbo.algorithms import simfbo; "
        "from simfbo.runs.describe import describe; from simfbo.tasks import quadratic; "
        "task = quadratic(); rules = Point(*map(optax.adam, (0.1, 0.2, 0.3))); "
        "method = simfbo(task.problem, Point(1.0, 2.0, 3.0), rules); "
        "print(json.dumps([describe(vars(method)), task.data.digest]))"
    )
    found = {
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
        for _ in range(2)
    }
    assert len(found) == 1


PARTS = [np.arange(6.0).reshape(3, 2), np.ones((2, 2))]


@pytest.mark.parametrize(
    "other",
    [
        from_clients([PARTS[0] + np.eye(3, 2) * 1e-15, PARTS[1]], PARTS),
        from_clients([PARTS[0][::-1], PARTS[1]], PARTS),
        from_clients(PARTS, PARTS[::-1]),
        from_clients(PARTS, PARTS, p=[1, 2]),
        from_clients(PARTS, PARTS, batch_size=2),
        from_clients(PARTS, PARTS, ids=[0, 2]),
        from_clients([part.astype(np.float32) for part in PARTS], PARTS),
    ],
)
def test_any_change_of_the_data_is_seen(other):
    data = from_clients(PARTS, PARTS)
    assert data.digest == from_clients(PARTS, PARTS).digest
    assert other.digest != data.digest
    assert replace(data, p=np.array([0.5, 0.5])).digest != data.digest


def test_who_holds_which_sample_is_part_of_the_digest():
    rows = [np.array([0, 1]), np.array([2, 3])]
    data = federate(np.arange(4.0), rows, rows)
    assert data.digest == federate(np.arange(4.0), rows, rows).digest
    assert data.digest != federate(np.arange(4.0), rows[::-1], rows).digest
