"""Compiled rounds: the same numbers, ledger and history as one round at a time."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functional import Changed, Functional

from simfbo import (
    DebugFederation,
    Gate,
    Ledger,
    Point,
    SimulatedFederation,
    aggregation,
    algorithms,
    run,
)
from simfbo.algorithms import simfbo
from simfbo.core import keys
from simfbo.core.keys import Purpose, host_rng, keyed
from simfbo.core.local_work import (
    LocalWork,
    coefficients,
    constant,
    fixed,
    momentum,
    proximal,
    sgd,
    uniform,
)
from simfbo.core.sampling import (
    Cohort,
    HostSampler,
    drop_out,
    with_replacement,
    without_replacement,
)
from simfbo.engines import rounds as compiled
from simfbo.engines.base import PROGRAMS
from simfbo.errors import UserError
from simfbo.runs.verdict import measured
from simfbo.tasks import quadratic

TASK = quadratic(clients=6, dim_x=2, dim_y=3, samples=4, noise=0.3, batch_size=2, seed=4)
STEPS = Point(x=0.05, y=0.2, v=0.1)
METHODS = {
    "simfbo": simfbo(TASK.problem, STEPS, radius=10.0),
    "shrofbo": algorithms.shrofbo(TASK.problem, STEPS),
    "fednest": algorithms.fednest(TASK.problem, STEPS, neumann_terms=2),
    "fednest released": algorithms.fednest(TASK.problem, STEPS, 1, 2, mode="as_released"),
    "lfednest": algorithms.lfednest(TASK.problem, STEPS),
    "fedbio": algorithms.fedbio(TASK.problem, STEPS, radius=5.0),
    "memfbo": algorithms.memfbo(TASK.problem, STEPS, order=2),
    "fedmsa": algorithms.fedmsa(TASK.problem, STEPS, radius=0.5),
    "fedbioacc": algorithms.fedbioacc(TASK.problem, STEPS, radius=5.0),
    "tuning-free": algorithms.tuning_free(
        lambda plan: algorithms.shrofbo(TASK.problem, plan.local, plan.server)
    ),
    "fedavg": algorithms.fedavg(TASK.problem, 0.2),
}
WORLDS = {
    "everyone": {"detect_anomalies": True},
    "sampled": {"sampler": without_replacement(3), "local_work": uniform(1, 3, every_round=True)},
    "replaced": {
        "sampler": with_replacement(4),
        "local_work": constant(2, [sgd(), momentum(0.5), proximal(0.2)], rules_every_round=True),
    },
    "faulty": {
        "local_work": fixed([1, 2, 3, 1, 2, 3]),
        "absence": drop_out(0.3),
        "detect_anomalies": True,
    },
    "robust": {
        "aggregators": Point(*[aggregation.median()] * 3),
        "gate": Gate(max_norm=2.0),
        "local_work": fixed(
            [1, 2, 3, 1, 2, 3], [sgd(), momentum(0.5), coefficients([2, 1, 3])] * 2
        ),
    },
    "centres": {
        "aggregators": Point(
            aggregation.geometric_median(), aggregation.centred_clipping(), aggregation.median()
        ),
        "absence": drop_out(0.3),
    },
}
SLOW = pytest.mark.slow
PAIRS = [("simfbo", world) for world in WORLDS]
ELSEWHERE = ("simfbo", "fedbio", "fednest released")
PAIRS += [(name, "sampled") for name in METHODS if name not in ELSEWHERE]
PAIRS += [("fedbio", "faulty"), ("fednest released", "faulty")]
# Slow: rounds of the same form as another's: loops as FedNest's, one exchange as SimFBO's.
ALIKE = ("lfednest", "fednest released", "fedmsa", "shrofbo", "fedbio")
PAIRS = [pytest.param(*one, marks=SLOW if one[0] in ALIKE else ()) for one in PAIRS]
CLOCKS = ("seconds", "cpu_seconds")


def go(algorithm, federation, rounds=6, **options):
    options = {"evaluate": TASK.evaluate, "every": 4, "seed": 3, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in a robust world most clients are refused
        return run(algorithm, federation, TASK.x0, TASK.y0, rounds=rounds, **options)


def made(world, strategy="batches"):
    return SimulatedFederation(TASK.data, strategy=strategy, **WORLDS[world])


def prepared(algorithm, federation):
    return compiled.prepare(algorithm, federation, algorithm.init(TASK.x0, TASK.y0), measured)


def kept(history):
    """Return a history's lines without what the clock says and without metrics."""
    records = [
        {key: a for key, a in record.items() if key not in CLOCKS and "error" not in key
         and "grad" not in key}
        for record in history.records
    ]  # fmt: skip
    said = [{**line, "text": None} for line in history.refusals]
    return records, said, history.end


@pytest.mark.parametrize(("name", "world"), PAIRS)
def test_blocks_are_rounds_in_lanes(name, world):
    """State to rounding; ledger, records and refusals exactly."""
    algorithm, one, many = METHODS[name], made(world, "lanes"), made(world)
    assert prepared(algorithm, one) is None
    assert prepared(algorithm, many) is not None
    expected, found = go(algorithm, one), go(algorithm, many)
    for got, want in zip(jax.tree.leaves(found.state), jax.tree.leaves(expected.state)):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
    assert many.ledger == one.ledger
    assert kept(found) == kept(expected)
    assert many.observed == one.observed
    if expected.verdict is not None:
        for key in expected.verdict.keys() - {"text", "status", "converged"}:
            np.testing.assert_allclose(found.verdict[key], expected.verdict[key], rtol=1e-8)


@pytest.mark.parametrize("world", ["sampled", "faulty"])
def test_how_a_run_is_cut_changes_no_bit(world):
    algorithm, federation = METHODS["simfbo"], made(world)
    whole = go(algorithm, federation, rounds=12, every=12)
    federation.ledger = Ledger()
    one_by_one = go(algorithm, federation, rounds=12, every=12, on_round=lambda t, record: None)
    federation.ledger = Ledger()
    in_threes = go(algorithm, federation, rounds=12, every=3)
    for other in (one_by_one, in_threes):
        for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(other.state)):
            np.testing.assert_array_equal(a, b)
        assert other.refusals == whole.refusals
        assert other.verdict == whole.verdict


def test_callbacks():
    """`on_round` follows every round, `on_progress` the last of a block."""
    algorithm, every, some = METHODS["simfbo"], [], []
    go(algorithm, made("everyone"), on_round=lambda t, record: every.append(t))
    go(algorithm, made("everyone"), on_progress=lambda t, record: some.append((t, bool(record))))
    assert every == list(range(7))
    assert [t for t, _ in some] == sorted({t for t, _ in some})
    assert [t for t, recorded in some if recorded] == [0, 4, 6]  # blocks end there at the latest


def test_a_run_may_end_before_its_last_round():
    history = go(METHODS["simfbo"], made("everyone"), rounds=40, until=lambda rows: len(rows) == 3)
    assert [record["round"] for record in history.records] == [0, 4, 8]
    assert history.end == {"status": "finished"}
    assert history.verdict is not None


def test_keys_may_depend_on_the_state():
    algorithm, world = Functional("simfbo", METHODS["simfbo"].init, key_from_state), "sampled"
    many, one = made(world), made(world, "lanes")
    assert prepared(algorithm, many) is not None
    np.testing.assert_allclose(go(algorithm, many).state.y, go(algorithm, one).state.y, rtol=1e-10)


def key_from_state(state, federation, key):
    """Draw a cohort by a key that depends on the state."""
    key = jax.random.fold_in(key, (1000 * jnp.abs(state.y[0])).astype(jnp.int32))
    return METHODS["simfbo"].round(state, federation, key)


# What needs the host

HOST = {
    "draws on the host": (algorithms.aggitd(TASK.problem, STEPS, lower_rounds=2), {}),
    "chains": (algorithms.fedmbo(TASK.problem, STEPS), {"sampler": with_replacement(3)}),
    "automatic gate": (METHODS["simfbo"], {"gate": Gate(max_norm="auto")}),
    "lanes": (METHODS["simfbo"], {"strategy": "lanes"}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOST)
def test_what_needs_the_host_runs_one_by_one(name):
    algorithm, world = HOST[name]
    federation = SimulatedFederation(TASK.data, **{"strategy": "batches", **world})
    assert prepared(algorithm, federation) is None
    assert go(algorithm, federation, rounds=2).end == {"status": "finished"}


def test_secret_cohorts_need_the_host():
    federation = made("sampled")
    federation.secret = True
    assert prepared(METHODS["simfbo"], federation) is None


# Unusual rounds


def test_too_few_replies_in_a_block():
    """The run ends in the round in which it would have ended one by one."""

    @keyed
    def absence(key, ids):
        return host_rng(key, Purpose.DROP_OUT).random(6)[ids] < 0.5

    ends, ledgers = [], []
    for strategy in ("lanes", "batches"):
        world = {"gate": Gate(min_replies=2), "absence": absence, "strategy": strategy}
        federation = SimulatedFederation(TASK.data, **world)
        history = go(METHODS["simfbo"], federation, rounds=60, every=60)
        ends.append((history.end, [r["round"] for r in history.records], len(history.refusals)))
        ledgers.append(federation.ledger)
    assert ends[0][0]["status"] == "starved"
    assert ends[0] == ends[1]
    assert ledgers[0] == ledgers[1]


@pytest.mark.parametrize("explosion", [1e6, 1e-2])
def test_divergence_in_a_block(explosion):
    steep = simfbo(TASK.problem, Point(x=3.0, y=3.0, v=3.0))
    ends = []
    for strategy in ("lanes", "batches"):
        federation = made("everyone", strategy)
        history = go(steep, federation, rounds=400, every=400, explosion=explosion)
        history.end.pop("reason")
        ends.append((history.end, [r["round"] for r in history.records]))
    assert ends[0][0]["status"] == "diverged"
    assert ends[0] == ends[1]


def test_cohorts_may_differ_in_size():
    @keyed
    def sampler(key, p):
        rng = host_rng(key, Purpose.COHORT)
        size = 3 if rng.random() < 0.7 else 2
        return Cohort(np.sort(rng.choice(6, size, replace=False)), np.full(size, 1 / size))

    states = []
    for strategy in ("lanes", "batches"):
        federation = SimulatedFederation(TASK.data, sampler, strategy=strategy)
        states.append(go(METHODS["simfbo"], federation, rounds=12, every=12).state)
    for a, b in zip(*map(jax.tree.leaves, states)):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_a_sampler_that_takes_turns_gives_the_same_run_on_every_engine():
    """It ignores its key: calling it twice with one key says nothing about later rounds."""

    def taking_turns():
        turn = itertools.count()
        return lambda key, p: Cohort((np.arange(2) + next(turn) // 2) % 6, np.full(2, 0.5))

    states = []
    for engine in (SimulatedFederation, DebugFederation):
        states.append(go(METHODS["simfbo"], engine(TASK.data, taking_turns()), rounds=7).state)
    np.testing.assert_allclose(states[0].x, states[1].x, rtol=1e-10)
    message = r"^Rounds of SimFBO run one at a time: the sampler '<lambda>' is a NumPy function \("
    with pytest.warns(UserWarning, match=message):
        assert prepared(METHODS["simfbo"], SimulatedFederation(TASK.data, taking_turns())) is None


def test_errors_of_a_sampler_are_raised_as_they_are():
    @keyed(size=3)
    def two(key, p):
        return Cohort(np.arange(2), np.full(2, 0.5))

    federation = SimulatedFederation(TASK.data, two)
    for _ in range(2):
        with pytest.raises(UserError, match="drew 2 clients: it was declared to draw 3"):
            run(METHODS["simfbo"], federation, TASK.x0, TASK.y0, rounds=3)


def test_a_sampler_is_constant_if_it_says_so():
    draw = lambda key, p: Cohort(np.arange(6), p)  # noqa: E731
    plain = SimulatedFederation(TASK.data, draw).draws[0]
    assert isinstance(plain, HostSampler)
    declared = SimulatedFederation(TASK.data, keys.constant(draw)).draws[0]
    assert declared.static
    assert declared(jax.random.key(0), TASK.data.p).ids.tolist() == list(range(6))


# Programs


def test_step_sizes_are_inputs_of_a_block():
    before = len(PROGRAMS.compiled)
    task = quadratic(clients=3, dim_x=2, dim_y=2, seed=9)
    for step in (0.1, 0.2, 0.3):
        algorithm = simfbo(task.problem, Point(x=0.05, y=step, v=0.1))
        federation = SimulatedFederation(task.data, strategy="batches")
        history = run(algorithm, federation, task.x0, task.y0, rounds=3)
        lanes = SimulatedFederation(task.data, strategy="lanes")
        expected = run(algorithm, lanes, task.x0, task.y0, rounds=3)
        np.testing.assert_allclose(history.state.y, expected.state.y, rtol=1e-10)
    assert len(PROGRAMS.compiled) - before == 2  # a block, and the client step in lanes


def test_an_algorithm_of_ones_own():
    """Without a word about how it is compiled; it compares a step size with something."""

    def own(step):
        client_step = METHODS["fedbio"].fedbio_step

        def round(state, federation, key):
            d = federation.sum(client_step, state, federation.cohort(key), key)
            return jax.tree.map(lambda z, d: z - (step if step > 0.1 else 0.1) * d, state, d)

        def init(x, y):
            return Point(jnp.asarray(x), jnp.asarray(y), jnp.zeros_like(jnp.asarray(y)))

        return Functional("own", init, round)

    for step in (0.05, 0.2):
        federation = made("everyone")
        assert prepared(own(step), federation) is not None
        expected = go(own(step), made("everyone", "lanes")).state
        np.testing.assert_allclose(go(own(step), federation).state.y, expected.y, rtol=1e-10)


def counted(state, federation, key):
    """Let the step size depend on what was sent so far."""
    d = federation.sum(METHODS["fedbio"].fedbio_step, state, federation.cohort(key), key)
    step = 0.1 / (1 + federation.ledger.total.rounds)
    return jax.tree.map(lambda z, d: z - step * d, state, d)


def start(x, y):
    return Point(jnp.asarray(x), jnp.asarray(y), jnp.zeros_like(jnp.asarray(y)))


def test_the_ledger_is_not_known_in_a_trace():
    algorithm = Functional("counted", start, counted)
    reads = (
        r"^Rounds of counted run one at a time: it reads federation\.ledger at line \d+ of test_"
    )
    with pytest.warns(UserWarning, match=reads):
        assert prepared(algorithm, made("everyone")) is None
    both = [go(algorithm, made("everyone", strategy)).state.y for strategy in ("lanes", "batches")]
    np.testing.assert_allclose(*both, rtol=1e-10)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda state: state if state.x[0] > 9 else state._replace(v=state.y),
            "it branches on an array",
        ),
        (lambda state: state._replace(x=np.asarray(state.x)), "it converts an array to NumPy"),
        (lambda state: state._replace(x=float(state.x[0]) * state.x), "it needs the value of an"),
        (lambda state: state._replace(server=list(state.server)), "the structure, a shape or"),
        (lambda state: (state.x.is_ready(), state)[1], "tracing failed with AttributeError: "),
    ],
)
def test_a_method_that_cannot_be_compiled_triggers_one_warning_with_the_reason(change, reason):
    method = Changed(METHODS["simfbo"], lambda round, state, *rest: change(round(state, *rest)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run(method, made("everyone"), TASK.x0, TASK.y0, rounds=2)
    (warning,) = caught
    assert f"Rounds of SimFBO run one at a time: {reason}" in str(warning.message)
    assert ("of test_rounds.py, '" in str(warning.message)) != reason.startswith("the structure")


def test_a_state_with_python_numbers():
    def init(x, y):
        return {"at": start(x, y), "count": 0}

    class State(dict):
        x = property(lambda self: self["at"].x)
        y = property(lambda self: self["at"].y)

    jax.tree_util.register_pytree_with_keys(
        State,
        lambda s: (((jax.tree_util.DictKey("at"), s["at"]),
                    (jax.tree_util.DictKey("count"), s["count"])), None),
        lambda _, parts: State(at=parts[0], count=parts[1]),
    )  # fmt: skip

    def round(state, federation, key):
        at = METHODS["fedbio"].round(state["at"], federation, key)
        return State(at=at, count=state["count"] + 1)

    algorithm = Functional("numbers", lambda x, y: State(init(x, y)), round)
    assert go(algorithm, made("everyone"), rounds=3).method_state["count"] == 3


def test_draws_of_ones_own_get_keys_and_not_their_data():
    @keyed
    def sampler(key, p):
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        ids = np.sort(np.asarray(jax.random.permutation(key, 6)[:3]))
        return Cohort(ids, np.full(3, 1 / 3))

    states = [
        go(METHODS["simfbo"], SimulatedFederation(TASK.data, sampler, strategy=strategy)).state
        for strategy in ("lanes", "batches")
    ]
    np.testing.assert_allclose(states[0].y, states[1].y, rtol=1e-10)


def test_too_many_local_steps_are_one_sentence():
    work = LocalWork(lambda key, n: np.full(n, 3), 2)
    with pytest.raises(UserError, match="Numbers of local steps must lie between 1 and 2"):
        go(METHODS["simfbo"], SimulatedFederation(TASK.data, local_work=work))
