"""The gate: every kind of bad reply, in every place, leaves exactly the run without that client."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import (
    DebugFederation,
    SimulatedFederation,
    Steps,
    TooFewReplies,
    UserError,
    from_clients,
)
from simfbo.algorithms import shrofbo
from simfbo.core.federation import Algorithm
from simfbo.core.gate import Gate
from simfbo.core.local_work import fixed
from simfbo.core.problem import Point
from simfbo.core.sampling import Cohort, drop_out, with_replacement, without_replacement
from simfbo.runs.runner import run
from simfbo.tasks._quadratic import random_quadratic

TASK = random_quadratic(5, 2, 3, heterogeneity=1.0, seed=3).task()
STEPS = Steps(y=0.2, v=0.2, x=0.1)
ENGINES = [SimulatedFederation, DebugFederation]
ROUNDS = 2


def assert_same(a, b):
    for u, w in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True):
        np.testing.assert_array_equal(u, w)


def plain():
    """Return a method whose messages cost nothing: what is tried here is what happens to them.

    Client i's own number, times which its message is sent, is the first of its lower samples.
    """

    def step(payload, client):
        own = client.data.lower_batch(client.key)[0]
        return Point(0.01 * payload.x * own, 0.01 * payload.y * own, payload.v / 7)

    def round(state, federation, key):
        change = federation.aggregate(step, state, federation.cohort(key), key)
        return jax.tree.map(jnp.add, state, change)

    return Algorithm("plain", lambda x, y: Point(x, y, y), round, (step,))


PLAIN = plain()


def numbered(*numbers):
    """Return the data of clients with these numbers."""
    samples = [np.full(1, float(number)) for number in numbers]
    return from_clients(samples, samples)


def go_plain(wire=None, engine=DebugFederation, data=None, rounds=ROUNDS, options=None, **rules):
    """Return a run of that method, with something on the wire."""
    federation = engine(numbered(1, 2, 3, 4, 5) if data is None else data, **rules)
    if wire:
        federation.wire = wire
    start = np.ones(2), 1 + np.arange(3.0)
    return run(PLAIN, federation, *start, rounds=rounds, **(options or {}))


def without(client):
    """Return the run in which a client never replies."""
    return go_plain(absence=lambda key, ids: ids == client)


def changed(reply, **parts):
    return reply._replace(arrays={**reply.arrays, **parts})


def y_of(reply):
    return reply.arrays[".y"]


def put(reply, value, place=0):
    array = y_of(reply).copy()
    array[place] = value
    return changed(reply, **{".y": array})


def left_out(reply, name):
    return reply._replace(arrays={key: a for key, a in reply.arrays.items() if key != name})


KINDS = {
    "nan": lambda r: [put(r, np.nan)],
    "nan at the end": lambda r: [put(r, np.nan, -1)],
    "inf": lambda r: [put(r, np.inf)],
    "minus inf": lambda r: [put(r, -np.inf)],
    "all nan": lambda r: [changed(r, **{".x": np.full_like(r.arrays[".x"], np.nan)})],
    "overflows": lambda r: [put(r, 1e200)],
    "missing key": lambda r: [left_out(r, ".v")],
    "no keys": lambda r: [r._replace(arrays={})],
    "extra key": lambda r: [changed(r, more=y_of(r))],
    "renamed key": lambda r: [changed(left_out(r, ".y"), **{".Y": y_of(r)})],
    "key is no text": lambda r: [r._replace(arrays={**left_out(r, ".y").arrays, 7: y_of(r)})],
    "shape": lambda r: [changed(r, **{".y": np.ones(4)})],
    "rank up": lambda r: [changed(r, **{".y": y_of(r)[None]})],
    "rank down": lambda r: [changed(r, **{".y": y_of(r)[0]})],
    "empty": lambda r: [changed(r, **{".y": np.ones(0)})],
    "huge": lambda r: [changed(r, **{".y": np.zeros(100_000)})],
    "dtype narrow": lambda r: [changed(r, **{".y": y_of(r).astype("float32")})],
    "dtype whole": lambda r: [changed(r, **{".y": y_of(r).astype(int)})],
    "dtype complex": lambda r: [changed(r, **{".y": y_of(r).astype(complex)})],
    "byte order": lambda r: [changed(r, **{".y": y_of(r).astype(">f8")})],
    "objects": lambda r: [changed(r, **{".y": y_of(r).astype(object)})],
    "text": lambda r: [changed(r, **{".y": "0.1 0.2 0.3"})],
    "a list": lambda r: [changed(r, **{".y": y_of(r).tolist()})],
    "nothing": lambda r: [changed(r, **{".y": None})],
    "no arrays": lambda r: [r._replace(arrays=None)],
    "arrays in a list": lambda r: [r._replace(arrays=list(r.arrays.values()))],
    "stale round": lambda r: [r._replace(exchange=r.exchange - 1)],
    "future round": lambda r: [r._replace(exchange=r.exchange + 1)],
    "round is text": lambda r: [r._replace(exchange=str(r.exchange))],
    "round is not a number": lambda r: [r._replace(exchange=float("nan"))],
    "duplicate": lambda r: [r, r],
    "contradiction": lambda r: [r, changed(r, **{".y": 2 * y_of(r)})],
    "unknown client": lambda r: [r._replace(client=77)],
    "negative client": lambda r: [r._replace(client=-1)],
    "client is text": lambda r: [r._replace(client=str(r.client))],
    "client is true": lambda r: [r._replace(client=True)],
    "another repeat": lambda r: [r._replace(repeat=1)],
    "not a reply": lambda r: [r.arrays],
    "nothing at all": lambda r: [None],
    "silence": lambda r: [],
}


def test_there_are_enough_kinds():
    assert len(KINDS) >= 18


@pytest.fixture(scope="module")
def expected():
    return {client: without(client) for client in (0, 4)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("client", [0, 4])
def test_a_bad_reply_leaves_the_run_without_that_client(kind, client, expected):
    def wire(replies):
        bad = KINDS[kind](replies[client])
        return [*bad, *replies[:client], *replies[client + 1 :]]

    history = go_plain(wire)
    assert_same(history, expected[client])
    assert history.end == {"status": "finished"}
    assert len(history.refusals) >= ROUNDS
    named = {refusal["client"] for refusal in history.refusals}
    assert client in named or kind == "silence"
    assert all(refusal["work"] == "step" for refusal in history.refusals)


@pytest.mark.parametrize("kind", ["stale round", "unknown client", "not a reply"])
def test_a_stray_beside_the_true_reply_changes_nothing(kind):
    history = go_plain(lambda replies: [*KINDS[kind](replies[2]), *replies])
    assert_same(history, go_plain())
    assert len(history.refusals) == ROUNDS


def test_the_order_of_arrival_never_changes_a_bit():
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        assert_same(go_plain(lambda replies, order=order: [replies[j] for j in order]), go_plain())


def test_the_order_of_arrival_changes_no_refusal_either():
    found = []
    for step in (1, -1):
        federation = DebugFederation(TASK.data)
        federation.wire = lambda replies, step=step: [put(r, np.nan) for r in replies[:3]][::step]
        with pytest.raises(TooFewReplies):
            go_one(federation)
        found.append(federation.refusals)
    assert found[0] == found[1]
    assert len(found[0]) == 5


def go_one(federation):
    """Return one aggregate of a small work over everybody."""

    def work(payload, client):
        return Point(y=payload * jnp.ones(2))

    cohort = federation.cohort(jax.random.key(0))
    return federation.aggregate(work, np.ones(()), cohort, jax.random.key(0))


@pytest.mark.parametrize("engine", ENGINES)
def test_those_left_are_weighed_again(engine):
    """sum_{S} w_i z_i * asked / |S|, by hand, with unequal weights."""
    data = from_clients(
        [np.full((1, 1), float(m)) for m in (1, 2, 3, 4)], [np.ones((1, 1))] * 4, p=[1, 2, 3, 4]
    )

    def work(payload, client):
        return Point(y=client.data.lower_batch(client.key).reshape(-1)[:1])

    federation = engine(data, absence=lambda key, ids: ids == 2)
    cohort = federation.cohort(jax.random.key(0))
    total = federation.aggregate(work, np.zeros(()), cohort, jax.random.key(0))
    np.testing.assert_allclose(total.y, [(0.1 * 1 + 0.2 * 2 + 0.4 * 4) * 4 / 3], rtol=1e-12)
    assert federation.latest.factor == 4 / 3
    assert federation.latest.admitted.tolist() == [True, True, False, True]
    assert [(r.client, r.reason) for r in federation.refusals] == [(2, "did not reply")]
    assert federation.ledger.total.bytes_up == 3 * 8  # who does not reply sends nothing
    assert federation.ledger.total.bytes_down == 4 * 8


@pytest.mark.parametrize("factor", [np.nan, np.inf, -np.inf, 1e200, 1e7])
@pytest.mark.parametrize("client", [0, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_refuse_alike(engine, client, factor):
    """What the compiled mask leaves out is what a silent client leaves out, to the bit."""
    numbers = [1.0, 2.0, 3.0, 4.0, 5.0]
    silent = go_plain(
        engine=engine, data=numbered(*numbers), absence=lambda key, ids: ids == client
    )
    numbers[client] = factor
    bad = go_plain(engine=engine, data=numbered(*numbers), gate=Gate(max_norm=1e4))
    assert_same(bad, silent)
    assert {refusal["client"] for refusal in bad.refusals} == {client}
    reason = bad.refusals[0]["reason"]
    assert ("norm" in reason) == (factor == 1e7)
    assert ("not finite" in reason) == (factor != 1e7)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_limit_itself_passes(engine):
    data = from_clients([np.ones((1, 1))] * 2, [np.ones((1, 1))] * 2)

    def work(payload, client):
        return Point(x=jnp.array([3.0]), y=jnp.array([0.0, 4.0]))

    for limit, passes in ((5.0, True), (4.999, False)):
        federation = engine(data, gate=Gate(max_norm=limit))
        cohort = federation.cohort(jax.random.key(0))
        if passes:
            federation.aggregate(work, np.zeros(()), cohort, jax.random.key(0))
            assert federation.refusals == []
        else:
            with pytest.raises(TooFewReplies) as caught:
                federation.aggregate(work, np.zeros(()), cohort, jax.random.key(0))
            assert str(caught.value) == (
                "only 0 of 2 replies to 'work' count: client 0 sent a message of norm 5, the limit "
                "is 4.999"
            )


@pytest.mark.parametrize("engine", ENGINES)
def test_too_few_replies_end_the_run(engine, tmp_path):
    late = {"now": False}

    def absence(key, ids):
        return (ids < 3) if late["now"] else ids < 0

    def on_round(t, record):
        late["now"] = t >= 4

    saved = {"directory": tmp_path, "every": 100}
    rules = {"engine": engine, "rounds": 9, "gate": Gate(min_replies=3)}
    history = go_plain(absence=absence, options={**saved, "on_round": on_round}, **rules)
    assert history.end == {
        "status": "starved",
        "round": 5,
        "client": 0,
        "reason": "only 2 of 5 replies to 'step' count: client 0 did not reply. "
        "Ask more clients, or accept fewer replies",
    }
    assert [record["round"] for record in history.records] == [0, 4]
    assert [(r["round"], r["client"]) for r in history.refusals] == [(5, 0), (5, 1), (5, 2)]
    again = go_plain(options={**saved, "resume": True}, **rules)
    assert_same(again, go_plain(**rules))
    assert again.refusals == []


@pytest.mark.parametrize("engine", ENGINES)
def test_as_many_replies_as_needed_are_enough(engine):
    for least in (1, 2):
        gate = Gate(min_replies=least)
        history = go_plain(engine=engine, gate=gate, absence=lambda key, ids: ids > 1)
        assert history.end == {"status": "finished"}


@pytest.mark.parametrize("engine", ENGINES)
def test_when_all_go_wild_the_run_has_diverged(engine, tmp_path):
    """Messages pass a norm of 1 in round 1 and not in round 2, for everybody."""
    options = {"directory": tmp_path, "checkpoint_seconds": 0.0}
    history = go_plain(
        engine=engine, data=numbered(20, 20, 20), gate=Gate(max_norm=1.0), rounds=9, options=options
    )
    reason = history.end.pop("reason")
    assert history.end == {"status": "diverged", "round": 2, "client": 0}
    assert reason == (
        "only 0 of 3 replies to 'step' count: client 0 sent a message of norm 1.14, the limit is "
        "1. Smaller steps often help"
    )
    assert [file.name for file in sorted(tmp_path.glob("checkpoint*"))] == [
        "checkpoint-0000000000.npz",
        "checkpoint-0000000001.npz",
    ]


def test_replies_in_another_format_are_no_divergence():
    """All clients send half precision: that is for a human to put right, and can be resumed."""

    def wire(replies):
        return [
            r._replace(arrays={k: a.astype("float16") for k, a in r.arrays.items()})
            for r in replies
        ]

    history = go_plain(wire)
    assert (history.end["status"], history.end["client"]) == ("starved", 0)
    assert "sent float16 numbers" in history.end["reason"]


def test_a_client_drawn_twice_may_answer_twice():
    rules = {"sampler": with_replacement(9)}
    history = go_plain(lambda replies: replies[::-1], **rules)
    assert history.refusals == []
    assert_same(history, go_plain(**rules))
    simulated = go_plain(engine=SimulatedFederation, **rules)
    np.testing.assert_allclose(history.state.x, simulated.state.x, rtol=1e-12)


def test_drop_outs_depend_on_the_client_alone():
    key = jax.random.key(5)
    everyone = drop_out(0.4)(key, np.arange(1000))
    some = np.array([3, 500, 999])
    np.testing.assert_array_equal(drop_out(0.4)(key, some), everyone[some])
    assert 330 < everyone.sum() < 470
    assert not drop_out(0.0)(key, some).any()


def test_drop_outs_are_pinned():
    """A stored run must meet the same drop-outs again, in whatever version."""
    assert np.flatnonzero(drop_out(0.3)(jax.random.key(0), np.arange(12))).tolist() == [1, 3, 5]


@pytest.mark.parametrize("rate", [-0.5, -1.0, 1.0, 1.5, float("nan")])
def test_the_rate_of_drop_outs_is_checked(rate):
    with pytest.raises(UserError) as caught:
        drop_out(rate)
    assert str(caught.value) == f"The rate of drop-outs must lie in [0, 1), got {rate}."


@pytest.mark.parametrize("engine", ENGINES)
def test_drop_outs_leave_the_mean_of_the_sum(engine):
    """Over all drop-outs of one client, the sum weighed again has the full sum as its mean."""
    federation = engine(TASK.data)
    z = np.array([5.0, -1.0, 2.0, 0.5, 8.0])

    def work(payload, client):
        return Point(y=jnp.asarray(z)[client.data.client][None])

    cohort = Cohort(np.arange(5, dtype=np.int32), np.full(5, 0.2))
    totals = []
    for gone in range(5):
        federation.absence = lambda key, ids, gone=gone: ids == gone
        totals.append(
            float(federation.aggregate(work, np.zeros(()), cohort, jax.random.key(1)).y[0])
        )
    np.testing.assert_allclose(np.mean(totals), z.mean(), rtol=1e-12)


def test_shrofbo_knows_rho_though_clients_drop_out():
    """rho comes from the server's own plan, so who is missing does not enter it."""
    work = fixed([1, 2, 3, 4, 5])
    absence = lambda key, ids: ids == 4  # noqa: E731

    def go(engine):
        federation = engine(TASK.data, local_work=work, absence=absence)
        return run(shrofbo(TASK.problem, STEPS), federation, TASK.x0, TASK.y0, rounds=1)

    a, b = map(go, ENGINES)
    np.testing.assert_allclose(a.state.x, b.state.x, rtol=1e-12)
    assert a.refusals == b.refusals


def test_engines_agree_under_partial_participation_and_drop_outs():
    rules = {"sampler": without_replacement(4), "absence": drop_out(0.3), "rounds": 12}
    a, b = (go_plain(engine=engine, **rules) for engine in ENGINES)
    assert a.refusals == b.refusals
    assert len(a.refusals) > 5
    assert a.column("refused")[-1] == len(a.refusals)
    assert a.column("bytes_up") == b.column("bytes_up")
    np.testing.assert_allclose(a.state.x, b.state.x, rtol=1e-10)
