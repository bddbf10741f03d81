"""The gate within a run: whoever is refused leaves exactly the run without that client."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functional import Functional

from simfbo import DebugFederation, Point, SimulatedFederation, TooFewReplies, UserError, run
from simfbo.algorithms import shrofbo
from simfbo.core.data import from_clients
from simfbo.core.exchange import Reason
from simfbo.core.gate import Gate
from simfbo.core.keys import keyed
from simfbo.core.local_work import fixed
from simfbo.core.sampling import Cohort, drop_out, with_replacement, without_replacement
from simfbo.tasks import random_quadratic

TASK = random_quadratic(5, 3, 4, seed=1).task()
STEPS = Point(x=0.1, y=0.2, v=0.2)
ENGINES = [SimulatedFederation, DebugFederation]
KEY = jax.random.key(0)


def assert_same(a, b):
    for u, w in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(u, w)


def step(payload, client):
    """A message that costs nothing: the first of the client's samples, times the payload."""
    own = client.data.lower_batch(client.key)[0]
    return Point(0.01 * payload.x * own, 0.01 * payload.y * own, payload.v / 7)


def one_round(state, federation, key):
    change = federation.sum(step, state, federation.cohort(key), key)
    return jax.tree.map(jnp.add, state, change)


def start(x, y):
    return Point(jnp.asarray(x), jnp.asarray(y), jnp.asarray(y))


PLAIN = Functional("plain", start, one_round, (step,))
X, Y = np.ones(2), 1 + np.arange(3.0)


def numbered(*numbers):
    """Return the data of clients with these numbers."""
    samples = [np.full(1, float(number)) for number in numbers]
    return from_clients(samples, samples)


FIVE = numbered(1, 2, 3, 4, 5)


def plain(engine=DebugFederation, data=FIVE, wire=None, **rules):
    """Return a federation of clients with numbers, with something on the wire."""
    federation = engine(data, **rules)
    if wire:
        federation.wire = wire
    return federation


def go(federation, rounds=2):
    """Return the state after some rounds of the plain method."""
    state = start(X, Y)
    for key in jax.random.split(KEY, rounds):
        state = one_round(state, federation, key)
    return state


def changed(reply, **parts):
    return reply._replace(arrays={**reply.arrays, **parts})


# One of each reason; tests/core/test_admit.py tries all that can be wrong, through the gate alone.
KINDS = {
    Reason.NOT_FINITE: lambda r: [changed(r, **{".y": np.nan * r.arrays[".y"]})],
    Reason.TOO_LARGE: lambda r: [changed(r, **{".y": 1e9 * r.arrays[".y"]})],
    Reason.MALFORMED: lambda r: [changed(r, **{".y": np.ones(4)})],
    Reason.WRONG_EXCHANGE: lambda r: [r._replace(exchange=r.exchange - 1)],
    Reason.DUPLICATE: lambda r: [r, r],
    Reason.NOT_REQUESTED: lambda r: [r._replace(client=77)],
    Reason.NO_REPLY: lambda r: [],
}


@pytest.mark.parametrize("client", [0, 4])
def test_a_bad_reply_leaves_the_run_without_that_client(client):
    """Another kind of bad reply in every round, and the same bits as without that client."""
    kinds = iter(KINDS.values())

    def wire(replies):
        bad = next(kinds)(replies[client])
        return [*bad, *replies[:client], *replies[client + 1 :]]

    federation = plain(wire=wire, gate=Gate(max_norm=1e6))
    silent = plain(absence=keyed(lambda key, ids: ids == client))
    assert_same(go(federation, len(KINDS)), go(silent, len(KINDS)))
    first = {refusal.exchange: refusal for refusal in reversed(federation.refusals)}
    assert [first[number].reason for number in sorted(first)] == list(KINDS)
    assert {refusal.client for refusal in federation.refusals} == {client, 77}
    assert {refusal.client_step for refusal in federation.refusals} == {"step"}
    assert len(silent.refusals) == len(KINDS)


def test_the_order_of_arrival_never_changes_a_bit():
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        shuffled = plain(wire=lambda replies, order=order: [replies[j] for j in order])
        assert_same(go(shuffled), go(plain()))
        assert shuffled.refusals == []


def test_the_order_of_arrival_changes_no_refusal_either():
    def wire(replies, turn):
        bad = KINDS[Reason.NOT_FINITE](replies[0]) + KINDS[Reason.MALFORMED](replies[1])
        return bad[::turn]

    found = []
    for turn in (1, -1):
        federation = plain(wire=lambda replies, turn=turn: wire(replies, turn))
        with pytest.raises(TooFewReplies):
            go(federation)
        found.append(federation.refusals)
    assert found[0] == found[1]
    assert len(found[0]) == 5


def number(payload, client):
    return Point(y=client.data.lower_batch(client.key)[:1])


@pytest.mark.parametrize("engine", ENGINES)
def test_those_left_are_weighed_again(engine):
    """sum_{S} w_i z_i * asked / |S|, by hand, with unequal weights."""
    samples = [np.full(1, float(m)) for m in (1, 2, 3, 4)]
    data = from_clients(samples, samples, p=[1, 2, 3, 4])
    federation = engine(data, absence=keyed(lambda key, ids: ids == 2))
    total = federation.sum(number, np.zeros(()), federation.cohort(KEY), KEY)
    np.testing.assert_allclose(total.y, [(0.1 * 1 + 0.2 * 2 + 0.4 * 4) * 4 / 3], rtol=1e-12)
    assert federation.latest.factor == 4 / 3
    assert federation.latest.admitted.tolist() == [True, True, False, True]
    np.testing.assert_array_equal(federation.latest.squares, [[1], [4], [0], [16]])
    assert federation.refusals == [(1, "number", 2, Reason.NO_REPLY, "did not reply")]
    assert federation.ledger.total.bytes_up == 3 * 8  # who does not reply sends nothing
    assert federation.ledger.total.bytes_down == 4 * 8


@pytest.mark.parametrize("engine", ENGINES)
def test_drop_outs_leave_the_mean_of_the_sum(engine):
    """Over all drop-outs of one client, the sum weighed again has the full sum as its mean."""
    federation = engine(numbered(5.0, -1.0, 2.0, 0.5))
    totals = []
    for gone in range(4):
        federation.absence = lambda key, ids, gone=gone: ids == gone
        cohort = Cohort(np.arange(4, dtype=np.int32), np.full(4, 0.25))
        totals.append(float(federation.sum(number, np.zeros(()), cohort, KEY).y[0]))
    np.testing.assert_allclose(np.mean(totals), 6.5 / 4, rtol=1e-12)


@pytest.mark.parametrize("client", [0, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_refuse_alike(engine, client):
    """What the compiled mask leaves out is what a silent client leaves out, to the bit."""
    gate = Gate(max_norm=1e4)
    silent = go(plain(engine, gate=gate, absence=keyed(lambda key, ids: ids == client)))
    for factor in (np.nan, np.inf, -np.inf, 1e200, 1e7):
        numbers = [1.0, 2.0, 3.0, 4.0, 5.0]
        numbers[client] = factor
        bad = plain(engine, numbered(*numbers), gate=gate)
        assert_same(go(bad), silent)
        assert {refusal.client for refusal in bad.refusals} == {client}
        reason = Reason.TOO_LARGE if factor == 1e7 else Reason.NOT_FINITE
        assert {refusal.reason for refusal in bad.refusals} == {reason}
        assert len(bad.refusals) == 2


def three_and_four(payload, client):
    return Point(x=jnp.array([3.0]), y=jnp.array([0.0, 4.0]))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_limit_itself_passes(engine):
    federation = plain(engine, gate=Gate(max_norm=5.0))
    federation.sum(three_and_four, np.zeros(()), federation.cohort(KEY), KEY)
    assert federation.refusals == []
    federation = plain(engine, gate=Gate(max_norm=4.999))
    with pytest.raises(TooFewReplies) as caught:
        federation.sum(three_and_four, np.zeros(()), federation.cohort(KEY), KEY)
    assert str(caught.value) == (
        "only 0 of 5 replies to 'three_and_four' count: client 0 sent a message of norm 5, the "
        "limit is 4.999"
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_an_exchange_needs_as_many_replies_as_asked_for(engine):
    two_left = {"absence": keyed(lambda key, ids: ids > 1)}
    for least in (0, 1, 2):
        go(plain(engine, gate=Gate(min_replies=least), **two_left), 1)
    with pytest.raises(TooFewReplies, match="only 2 of 5 replies to 'step' count: client 2 did"):
        go(plain(engine, gate=Gate(min_replies=3), **two_left), 1)
    with pytest.raises(TooFewReplies, match="only 0 of 5"):
        go(plain(engine, gate=Gate(min_replies=0), absence=keyed(lambda key, ids: ids >= 0)), 1)


def complex_numbers(payload, client):
    return Point(y=jnp.ones(2, complex))


@pytest.mark.parametrize("engine", ENGINES)
def test_complex_numbers_are_not_sent(engine):
    federation = plain(engine)
    with pytest.raises(UserError, match="'complex_numbers' returns complex128 numbers: return fl"):
        federation.sum(complex_numbers, np.ones(()), federation.cohort(KEY), KEY)


# In a run


def history_of(federation, rounds=2, **options):
    return run(PLAIN, federation, X, Y, rounds=rounds, **options)


@pytest.mark.parametrize("engine", ENGINES)
def test_too_few_replies_end_the_run(engine, tmp_path):
    late = {"now": False}

    @keyed
    def absence(key, ids):
        return (ids < 3) if late["now"] else ids < 0

    def on_round(t, record):
        late["now"] = t >= 2

    saved, gate = {"directory": tmp_path, "every": 100, "rounds": 4}, Gate(min_replies=3)
    history = history_of(plain(engine, gate=gate, absence=absence), on_round=on_round, **saved)
    reason = history.end.pop("reason")
    assert history.end == {"status": "starved", "round": 3, "client": 0}
    assert reason.startswith("only 2 of 5 replies to 'step' count: client 0 did not reply. ")
    assert [record["round"] for record in history.records] == [0, 2]
    assert [(r["round"], r["client"]) for r in history.refusals] == [(3, 0), (3, 1), (3, 2)]
    again = history_of(plain(engine, gate=gate), resume=True, **saved)
    assert_same(again.state, history_of(plain(engine, gate=gate), rounds=4).state)
    assert again.refusals == []


@pytest.mark.parametrize("engine", ENGINES)
def test_when_all_messages_grow_too_large_the_run_has_diverged(engine, tmp_path):
    """Messages pass a norm of 1 in round 1 and not in round 2, for everybody."""
    federation = plain(engine, numbered(20, 20, 20), gate=Gate(max_norm=1.0))
    history = history_of(federation, rounds=9, directory=tmp_path, checkpoint_seconds=0.0)
    reason = history.end.pop("reason")
    assert history.end == {"status": "diverged", "round": 2, "client": 0}
    assert reason.startswith(
        "only 0 of 3 replies to 'step' count: client 0 sent a message of norm 1.14, the limit is 1."
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

    history = history_of(plain(wire=wire))
    assert (history.end["status"], history.end["client"]) == ("starved", 0)
    assert "sent float16 numbers" in history.end["reason"]


# Drop-outs and repeats


def test_a_client_drawn_twice_may_answer_twice():
    rules = {"sampler": with_replacement(9)}
    backwards = plain(wire=lambda replies: replies[::-1], **rules)
    state = go(backwards)
    assert backwards.refusals == []
    assert_same(state, go(plain(**rules)))
    np.testing.assert_allclose(state.x, go(plain(SimulatedFederation, **rules)).x, rtol=1e-12)


def test_drop_outs_depend_on_the_client_alone():
    everyone = drop_out(0.4)(KEY, np.arange(1000))
    some = np.array([3, 500, 999])
    np.testing.assert_array_equal(drop_out(0.4)(KEY, some), everyone[some])
    assert drop_out(0.4)(KEY, np.array([0])).tolist() == everyone[:1].tolist()
    assert 330 < everyone.sum() < 470
    assert not drop_out(0.0)(KEY, some).any()


def test_drop_outs_are_pinned():
    """A stored run must meet the same drop-outs again, in whatever version."""
    assert np.flatnonzero(drop_out(0.3)(KEY, np.arange(12))).tolist() == [2, 4, 7]


@pytest.mark.parametrize("rate", [-0.5, -1.0, 1.0, 1.5, float("nan")])
def test_the_rate_of_drop_outs_is_checked(rate):
    with pytest.raises(UserError) as caught:
        drop_out(rate)
    assert str(caught.value) == f"The rate of drop-outs must lie in [0, 1), got {rate}."


def test_shrofbo_knows_rho_though_clients_drop_out():
    """rho comes from the server's own plan, so who is missing does not enter it.

    With steps on y alone, one round is y -= gamma rho 5/4 sum over those left of p_i grad_y g_i.
    """
    taus = np.array([1, 2, 3, 4, 5])
    federation = SimulatedFederation(
        TASK.data, local_work=fixed(taus), absence=keyed(lambda key, ids: ids == 4)
    )
    algorithm = shrofbo(TASK.problem, Point(0.0, 0.0, 0.0), Point(0.0, 0.1, 0.0))
    state = algorithm.round(algorithm.init(TASK.x0, TASK.y0), federation, KEY)
    quadratic = random_quadratic(5, 3, 4, seed=1)
    direction = -quadratic.c[:4].sum(0) / 5 * 5 / 4  # at zero, grad_y g_i is -c_i
    np.testing.assert_allclose(algorithm.point(state).y, -0.1 * taus.mean() * direction, rtol=1e-12)


def test_engines_agree_under_partial_participation_and_drop_outs():
    rules = {"sampler": without_replacement(4), "absence": drop_out(0.3)}
    federations = [plain(engine, **rules) for engine in ENGINES]
    a, b = (go(federation, 12) for federation in federations)
    refusals = [federation.refusals for federation in federations]
    assert refusals[0] == refusals[1]
    assert len(refusals[0]) > 5
    assert federations[0].ledger == federations[1].ledger
    np.testing.assert_allclose(a.x, b.x, rtol=1e-10)


def test_a_run_counts_its_refusals():
    history = history_of(plain(SimulatedFederation, absence=drop_out(0.3)), rounds=6)
    assert history.column("refused")[-1] == len(history.refusals) > 3
