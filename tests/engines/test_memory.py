"""What clients remember, on every engine and however rounds are computed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functional import Functional

from simfbo import Point, SimulatedFederation, UserError, run
from simfbo.algorithms import mimefbo, simfbo
from simfbo.core import memory
from simfbo.core.exchange import Reason
from simfbo.core.federation import WithMemory
from simfbo.core.gate import Gate
from simfbo.core.local_work import fixed
from simfbo.core.sampling import Cohort, drop_out, with_replacement, without_replacement
from simfbo.engines import CountingFederation, DebugFederation, cost
from simfbo.errors import TooFewReplies
from simfbo.privacy import Privacy, private
from simfbo.runs.checkpoint import files, load
from simfbo.tasks import random_quadratic

TASK = random_quadratic(6, 3, 4, seed=2).task(np.arange(1, 7), samples=6, noise=1.0, batch_size=2)
WORK = fixed([1, 2, 3, 1, 2, 5])
STEPS = Point(x=0.02, y=0.05, v=0.05)
KEY = jax.random.key(5)


def remembering(counts=1.0):
    """Return a method whose clients count how often they were asked, and remember their sum."""

    def counting_step(payload, client):
        kept = client.memory
        now = {"count": kept["count"] + counts, "sum": kept["sum"] + payload * (1 + kept["count"])}
        return WithMemory(Point(y=now["sum"]), now)

    def round(state, federation, key):
        total = federation.sum(counting_step, state.x, federation.cohort(key), key)
        return Point(state.x, total.y)

    def first(x0, y0):
        return {"count": np.zeros(()), "sum": np.zeros(3)}

    return Functional("counting", lambda x, y: Point(jnp.asarray(x), jnp.zeros(3)), round,
                     (counting_step,), memory=first)  # fmt: skip


def rounds(algorithm, federation, count, **options):
    return run(algorithm, federation, TASK.x0, TASK.y0, rounds=count, **options)


def close(a, b, tolerance=1e-10):
    jax.tree.map(lambda u, w: np.testing.assert_allclose(u, w, atol=tolerance), a, b)


ENGINES = {
    "lanes": lambda *parts: SimulatedFederation(*parts, strategy="lanes"),
    "batches": lambda *parts: SimulatedFederation(*parts, strategy="batches", chunk=2),
    "one batch": lambda *parts: SimulatedFederation(*parts, strategy="batches"),
}


SCAFFOLD = mimefbo(TASK.problem, STEPS, control="memory")
PARTS = TASK.data, without_replacement(3), WORK


@pytest.fixture(scope="module")
def interpreted():
    """Return the end of a run on the debug engine, and what its clients remember then."""
    debug = DebugFederation(*PARTS)
    return rounds(SCAFFOLD, debug, 4).state, debug.client_memory


@pytest.mark.parametrize(
    ("engine", "one_by_one"),
    [
        ("lanes", True),  # lanes know no blocks of rounds
        ("batches", False),
        ("one batch", False),
        ("one batch", True),
        pytest.param("batches", True, marks=pytest.mark.slow),
    ],
)
def test_all_engines_remember_alike(interpreted, engine, one_by_one):
    other = ENGINES[engine](*PARTS)
    end = rounds(SCAFFOLD, other, 4, on_round=(lambda *_: None) if one_by_one else None)
    close(interpreted, (end.state, other.client_memory))
    assert jax.tree.leaves(other.client_memory)[0].shape[0] == 6


def test_a_client_counts_exactly_how_often_it_was_asked():
    cohorts = iter([[0, 2], [2, 5], [2, 3]])

    def sample(key, p):
        return Cohort(np.array(next(cohorts)), np.ones(2))

    federation = DebugFederation(TASK.data, sample)
    federation.remember(remembering(), TASK.x0, TASK.y0)
    state = remembering().init(np.ones(3), None)
    for k in range(3):
        state = remembering().round(state, federation, jax.random.key(k))
    np.testing.assert_array_equal(federation.client_memory["count"], [1, 0, 3, 1, 0, 1])


@pytest.mark.parametrize("engine", [SimulatedFederation, DebugFederation])
def test_who_drops_out_or_is_refused_keeps_its_memory(engine):
    """A norm limit refuses the clients whose sums have grown; absent ones are not asked."""
    federation = engine(TASK.data, gate=Gate(max_norm=12.0), absence=drop_out(0.4))
    federation.remember(remembering(), TASK.x0, TASK.y0)
    state = remembering().init(np.ones(3), None)
    for key in jax.random.split(KEY, 4):
        old = federation.client_memory
        state = remembering().round(state, federation, key)
        admitted = np.isin(np.arange(6), federation.latest.request.ids[federation.latest.admitted])
        moved = np.asarray(federation.client_memory["count"] - old["count"])
        np.testing.assert_array_equal(moved, admitted)
    reasons = {refusal.reason for refusal in federation.refusals}
    assert reasons == {Reason.NO_REPLY, Reason.TOO_LARGE}
    assert np.asarray(federation.client_memory["count"]).max() == 3


def test_blocks_of_rounds_with_refusals_and_drop_outs_are_single_rounds():
    def federation():
        return SimulatedFederation(
            TASK.data, without_replacement(4), WORK, gate=Gate(max_norm=30.0), absence=drop_out(0.2)
        )

    many, one = federation(), federation()
    ends = rounds(SCAFFOLD, many, 20), rounds(SCAFFOLD, one, 20, on_round=lambda *_: None)
    jax.tree.map(np.testing.assert_array_equal, ends[0].state, ends[1].state)
    jax.tree.map(np.testing.assert_array_equal, many.client_memory, one.client_memory)
    assert any(line["client"] is not None for line in ends[0].refusals)


def test_too_few_replies_leave_the_memory_as_it_was():
    federation = SimulatedFederation(TASK.data, gate=Gate(min_replies=6), absence=drop_out(0.9))
    federation.remember(remembering(), TASK.x0, TASK.y0)
    with pytest.raises(TooFewReplies):
        remembering().round(remembering().init(np.ones(3), None), federation, KEY)
    assert not np.asarray(federation.client_memory["count"]).any()


def test_who_is_sampled_twice_keeps_what_its_last_reply_left():
    stack = {"a": jnp.zeros((4, 2))}
    rows, ids = {"a": jnp.arange(8.0).reshape(4, 2)}, np.array([0, 2, 2, 3])
    got = memory.kept(stack, rows, ids, np.array([True, True, True, False]))["a"]
    np.testing.assert_array_equal(got, [[0, 1], [0, 0], [4, 5], [0, 0]])
    got = memory.kept(stack, rows, ids, np.array([True, True, False, True]))["a"]
    np.testing.assert_array_equal(got, [[0, 1], [0, 0], [0, 0], [6, 7]])
    parts = TASK.data, with_replacement(5), WORK
    engines = DebugFederation(*parts), SimulatedFederation(*parts)
    for engine in engines:
        rounds(remembering(), engine, 3)
    close(*(engine.client_memory for engine in engines))


@pytest.mark.parametrize("cut", [1, 3])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, cut):

    def federation():
        return SimulatedFederation(TASK.data, without_replacement(3), WORK)

    def stop(t, record):
        if t == cut:
            raise KeyboardInterrupt

    options = {"evaluate": TASK.evaluate, "checkpoint_seconds": 0.0}
    whole, again = federation(), federation()
    want = rounds(SCAFFOLD, whole, 6, **options)
    rounds(SCAFFOLD, federation(), 6, directory=tmp_path, on_round=stop, **options)
    got = rounds(SCAFFOLD, again, 6, directory=tmp_path, resume=True, **options)
    jax.tree.map(np.testing.assert_array_equal, got.state, want.state)
    jax.tree.map(np.testing.assert_array_equal, again.client_memory, whole.client_memory)
    stored = load(files(tmp_path)[0]).arrays
    assert any(array.shape == (6, 4) for array in stored.values())


def test_memory_is_not_sent_and_its_size_is_known():
    federation = SimulatedFederation(TASK.data, without_replacement(2))
    rounds(SCAFFOLD, federation, 3)
    down, up = 2 * (3 + 2 * 4), 3 + 2 * 4 + 1
    assert federation.ledger.total.floats_down == 3 * 2 * down
    assert federation.ledger.total.floats_up == 3 * 2 * up
    assert federation.memory_bytes == 8 * (3 + 2 * 4)
    expected = cost(SCAFFOLD, federation, TASK.x0, TASK.y0).total
    assert expected.floats_up == 2 * up
    counting = CountingFederation(TASK.data)
    counting.remember(SCAFFOLD, TASK.x0, TASK.y0)
    assert counting.client_memory is None
    assert counting.memory_bytes == federation.memory_bytes


def test_a_new_run_starts_with_new_memories():
    federation = SimulatedFederation(TASK.data)
    first = rounds(remembering(), federation, 3)
    again = rounds(remembering(), federation, 3)
    np.testing.assert_array_equal(first.state.y, again.state.y)
    rounds(simfbo(TASK.problem, STEPS), federation, 1)
    assert federation.client_memory is None


def test_private_messages_keep_their_memory():
    """Clipping and noise change what is sent, never what is remembered."""
    clipped = private(remembering(), Privacy(Point(0.1, 0.1, 0.1), Point(1e-3, 1e-3, 1e-3)))
    plain, guarded = DebugFederation(TASK.data), DebugFederation(TASK.data)
    rounds(remembering(), plain, 1)
    rounds(clipped, guarded, 1)
    close(plain.client_memory, guarded.client_memory, 0)


def wrong_shape(payload, client):
    return WithMemory(Point(y=payload), {"count": client.memory["count"]})


def undeclared(payload, client):
    return WithMemory(Point(y=payload), payload)


def test_wrong_memories_are_refused_in_a_sentence():
    def asks(client_step):
        def round(state, federation, key):
            federation.sum(client_step, state.x, federation.cohort(key), key)
            return state

        return replace(remembering(), iterate=round)

    with pytest.raises(UserError, match="declare it as Method"):
        rounds(replace(asks(undeclared), memory=None), SimulatedFederation(TASK.data), 1)
    with pytest.raises(UserError, match="'wrong_shape' returns a memory of another shape"):
        rounds(asks(wrong_shape), DebugFederation(TASK.data), 1)

    class Plain:
        ledger, n = SimulatedFederation(TASK.data).ledger, 6

    with pytest.raises(UserError, match="clients of counting are stateful"):
        rounds(remembering(), Plain(), 1)
