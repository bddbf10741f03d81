"""What stands out among messages: against direct computations, and counted over time."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo.core.exchange import Exchange, Probed, Reason, Refusal, Request
from simfbo.core.problem import Point
from simfbo.robust import anomalies

TEN = np.full(10, 0.1)


def messages(seed=0, clients=10, size=100, common=1.0):
    """Return messages that agree in part, a row each."""
    rng = np.random.default_rng(seed)
    return common * rng.normal(size=size) + rng.normal(size=(clients, size))


def grams_of(rows):
    return anomalies.gram_matrices(rows, (rows.shape[1],))


def seen(rows, number=1, admitted=None):
    """Return an exchange with these messages, all on one channel."""
    admitted = np.ones(len(rows), bool) if admitted is None else admitted
    refusals = [
        Refusal(number, "step", int(i), Reason.TOO_LARGE, "") for i in np.flatnonzero(~admitted)
    ]
    request = Request(number, "step", np.arange(len(rows)), None)
    squares = (rows**2).sum(1, keepdims=True)
    probed = Probed(np.where(admitted[:, None], rows, 0), (rows.shape[1],))
    weights = np.full(len(rows), 1 / len(rows))
    return Exchange(
        request, admitted, squares, refusals, probed, weights=weights, work=np.ones(len(rows))
    )


def looks(rows, count, memory=None, first=1):
    """Return what `count` looks at the same messages say, and the memory."""
    memory, found = memory or {}, []
    for number in range(first, first + count):
        memory, said = anomalies.observe(memory, seen(rows, number))
        found += said
    return found, memory


# The probe


def test_a_small_message_is_probed_completely():
    message = (
        Point(x={"b": jnp.arange(3.0), "a": jnp.ones((2, 2))}, v=jnp.full(2, 7.0)),
        jnp.ones(()),
    )
    probe = anomalies.probe_of(message, 10)
    assert probe.widths == (7, 2)
    assert anomalies.take(probe, message).tolist() == [1, 1, 1, 1, 0, 1, 2, 7, 7]


def test_messages_without_channels_are_one_channel():
    message = {"weights": jnp.arange(4.0), "bias": jnp.ones(1)}
    probe = anomalies.probe_of(message, 10)
    assert probe.widths == (5,)
    assert anomalies.take(probe, message).tolist() == [1, 0, 1, 2, 3]


@pytest.mark.parametrize(("clients", "most"), [(10, 256), (64, 128), (10_000, 64)])
def test_a_large_message_is_probed_at_fixed_places_of_all_its_arrays(clients, most):
    sizes = {"a": jax.ShapeDtypeStruct((40, 50), float), "b": jax.ShapeDtypeStruct((900,), float)}
    probe = anomalies.probe_of(Point(y=sizes), clients)
    assert probe.widths == (most,)
    chosen = [at for _, at in probe.leaves]
    assert all(len(at) > most / 10 and (np.diff(at) > 0).all() for at in chosen)
    assert chosen[0].max() < 2000
    assert chosen[1].max() < 900
    numbers = Point(y={"a": jnp.arange(2000.0).reshape(40, 50), "b": jnp.arange(900.0)})
    np.testing.assert_array_equal(anomalies.take(probe, numbers), np.concatenate(chosen))
    anomalies._probe.cache_clear()  # nothing but shapes decides
    again = anomalies.probe_of(Point(y=sizes), clients)
    np.testing.assert_array_equal(np.concatenate([at for _, at in again.leaves]),
                                  np.concatenate(chosen))  # fmt: skip


def test_messages_that_do_not_count_are_zeros_and_few_exchanges_are_probed():
    request = Request(1, "step", np.arange(2), {"y": np.zeros(3)})
    found = anomalies.probed([None, {"y": np.ones(3)}], request)
    assert found.rows.tolist() == [[0, 0, 0], [1, 1, 1]]
    later = [number for number in range(1, 100) if anomalies.looks_at(number)]
    assert later == [*range(1, 33), 39, 52, 65, 78, 91]
    assert anomalies.probed([None, None], request._replace(number=40)) is None


# Few carry most of the sum


def test_few_carry_most_of_the_sum():
    norms = np.array([1.0, 1.1, 0.9, 100, 1.2, 1, 1, 0.8, 100, 1])
    assert anomalies.few(norms, TEN * norms, np.ones(10)).tolist() == [3, 8]


@pytest.mark.parametrize(
    ("norms", "weights", "work"),
    [
        ([1, 1, 1, 1, 1, 1, 1, 1, 5, 5], TEN, np.ones(10)),  # 56 % of the sum
        ([1, 1, 1, 1, 1, 1, 80, 80, 80, 80], TEN, np.ones(10)),  # not few
        ([1] * 10, [0.91] + [0.01] * 9, np.ones(10)),  # most of the data, not of the norm
        ([1] * 8 + [100] * 2, TEN, [1] * 8 + [100] * 2),  # who worked a hundred times as much
        ([1] * 8 + [100] * 2, [0.12] * 8 + [0.001] * 2, np.ones(10)),  # who hardly counts
        ([1, 100], [0.5, 0.5], np.ones(2)),
        ([], [], np.ones(0)),
    ],
)
def test_nobody_carries_too_much(norms, weights, work):
    norms = np.array(norms, float)
    assert not len(anomalies.few(norms, np.array(weights) * norms, np.array(work, float)))


# Directions


def against_the_rest(rows, weights):
    """Return cosines with the weighted sum of the others' directions, one by one."""
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    rests = [sum(weights[j] * units[j] for j in range(len(rows)) if j != i)
             for i in range(len(rows))]  # fmt: skip
    return np.array([u @ r / np.linalg.norm(r) for u, r in zip(units, rests, strict=True)])


@pytest.mark.parametrize("seed", range(20))
def test_opposed_against_a_direct_computation(seed):
    rng = np.random.default_rng(seed)
    rows, weights = messages(seed, common=rng.uniform(0, 2)), rng.dirichlet(np.ones(10))
    rows[: seed % 4] *= -rng.uniform(0.5, 20)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    shares = weights * np.linalg.norm(rows, axis=1) / (weights @ np.linalg.norm(rows, axis=1))
    minor = shares[:, None] + shares[None, :] < 0.5
    count = (((units @ units.T) < anomalies.OPPOSED) & minor).sum(1)
    few = 3 * (count > 0).sum() <= 20
    wanted = {i for i in range(10) if few and count[i] and 2 * count[i] >= count.max()}
    cosines = against_the_rest(rows, weights)
    lone = {i for i in range(10) if cosines[i] < anomalies.AGAINST}
    total, norms = np.linalg.norm(weights @ rows), weights @ np.linalg.norm(rows, axis=1)
    if (
        total > anomalies.CANCEL * norms
        and np.median(cosines) > anomalies.AGREE
        and 3 * len(lone) <= 10
    ):
        wanted |= lone
    assert {*anomalies.opposed(grams_of(rows), (100,), weights).tolist()} == wanted


def test_two_who_turn_their_messages_round_are_found():
    rows = messages()
    rows[[3, 8]] *= -1
    assert anomalies.opposed(grams_of(rows), (100,), TEN).tolist() == [3, 8]
    rows[[3, 8]] *= 1e100  # however large
    assert anomalies.opposed(grams_of(rows), (100,), TEN).tolist() == [3, 8]


def test_two_who_contradict_each_other_are_found_though_nobody_agrees():
    rows = messages(common=0.0)
    rows[4] = -2 * rows[7] + 0.1 * rows[0]
    assert anomalies.opposed(grams_of(rows), (100,), TEN).tolist() == [4, 7]
    rows[[4, 7]] *= 10  # they carry most of the sum, and may balance each other
    assert not len(anomalies.opposed(grams_of(rows), (100,), TEN))
    many = messages(clients=21, common=0.0)
    many[4] = -many[7]
    assert not len(anomalies.opposed(grams_of(many), (100,), np.full(21, 1 / 21)))


def test_directions_say_nothing_of_few_numbers_few_clients_or_near_a_solution():
    rows = messages()
    rows[0] *= -1
    assert len(anomalies.opposed(grams_of(rows), (100,), TEN)) == 1
    assert not len(anomalies.opposed(grams_of(rows[:, :63]), (63,), TEN))
    assert not len(anomalies.opposed(grams_of(rows[:5]), (100,), TEN[:5]))
    rows[0] = -rows[1:].sum(0)  # the sum is zero, as at a solution
    assert not len(anomalies.opposed(grams_of(rows), (100,), TEN))


def test_cosines_are_averaged_over_wide_channels():
    rows = messages(common=2.0)
    rows[2] *= -1
    both = np.hstack([rows, messages(1, size=30)])
    grams = anomalies.gram_matrices(both, (100, 30))
    np.testing.assert_allclose(
        grams * np.abs(both).max() ** 2, [rows @ rows.T, both[:, 100:] @ both[:, 100:].T]
    )
    assert anomalies.opposed(grams, (100, 30), TEN).tolist() == [2]


def test_equal_messages_of_different_clients_are_found():
    rows, ids = messages(), np.arange(10)
    rows[[1, 6]] = rows[5]
    assert anomalies.same(grams_of(rows), ids).tolist() == [1, 5, 6]
    ids[[1, 6]] = 5  # one client, drawn three times
    assert not len(anomalies.same(grams_of(rows), ids))
    assert not len(anomalies.same(grams_of(np.ones((10, 100))), np.arange(10)))  # all alike
    assert not len(anomalies.same(grams_of(messages()), np.arange(10)))


# Over time


def loud(*clients):
    rows = messages()
    rows[list(clients)] *= 100
    return rows


def test_a_suspicion_needs_most_of_the_recent_looks_and_is_told_once():
    found, memory = looks(loud(3, 8), anomalies.ALARM - 1)
    assert not found
    found, memory = looks(loud(3, 8), 60, memory, first=anomalies.ALARM)
    assert [(one.kind, one.clients, one.exchange) for one in found] == [("few", [3, 8], 8)]
    assert found[0].share == pytest.approx(200 / 208, rel=0.05)
    assert found[0].text == (
        f"clients 3, 8 send {100 * found[0].share:.0f} % of the norm: "
        "use an aggregator or a gate limit"
    )


def test_looks_that_find_nothing_are_taken_off():
    memory = {}
    for first in range(1, 32, 2):
        found, memory = looks(loud(3, 8), 1, memory, first)
        assert not found
        found, memory = looks(messages(), 1, memory, first + 1)
    assert memory == {}


def test_others_are_told_of_too_but_not_for_ever():
    memory, told = {}, []
    for clients in ([0, 1], [0, 1, 2], [4, 5], [6], [8, 9], [3]):
        found, memory = looks(loud(*clients), 16, memory, first=1)
        told += [one.clients for one in found if one.kind == "few"]
    assert told == [[0, 1], [4, 5], [6]]


def test_who_opposes_others_is_counted_client_by_client():
    """In every exchange somebody else contradicts client 0: nothing is said of any of them."""
    memory = {}
    for number in range(1, 30):
        rows = messages(number, common=0.0)
        rows[number % 9 + 1] = -rows[number % 5]
        memory, said = anomalies.observe(memory, seen(rows, number))
        assert not said
    opposed = messages(common=0.0)
    opposed[4] = -opposed[7]
    found, _ = looks(opposed, 10)
    assert [(one.kind, one.clients) for one in found] == [("opposed", [4, 7])]


def test_memory_is_json_and_is_not_changed():
    _, memory = looks(loud(3, 8), 5)
    kept = json.dumps(memory)
    found, after = looks(loud(3, 8), 3, memory, first=6)
    assert json.dumps(memory) == kept
    again, same = looks(loud(3, 8), 3, json.loads(kept), first=6)
    assert (found, after) == (again, same)
    assert len(found) == 1


def test_refused_messages_do_not_count_but_who_is_refused_all_the_time_is_named():
    rows, memory, found = loud(3, 8), {}, []
    for number in range(1, 30):
        admitted = np.arange(10) != 3
        admitted[8] = number % 2  # every other time
        memory, said = anomalies.observe(memory, seen(rows, number, admitted))
        found += said
    assert [(one.kind, one.clients) for one in found] == [("refused", [3])]
    assert found[0].text.startswith("client 3 exceeds the gate's limit in most exchanges")


def test_who_sends_what_is_not_finite_is_named_at_once_and_once():
    rows, memory, found = messages(), {}, []
    for number in (1, 2, 50):  # nobody looks at directions in the last one
        exchange = seen(rows, number)
        ids = [3] if number == 1 else [3, 7]
        bad = [Refusal(number, "step", i, Reason.NOT_FINITE, "") for i in ids]
        admitted = ~np.isin(np.arange(10), ids)
        exchange = exchange._replace(refusals=bad, admitted=admitted)
        memory, said = anomalies.observe(json.loads(json.dumps(memory)), exchange)
        found += said
    assert [(one.kind, one.clients, one.exchange) for one in found] == [
        ("not-finite", [3], 1), ("not-finite", [7], 2)]  # fmt: skip
    assert found[0].text == (
        "client 3 sent a message that is not finite and not counted: if its data hold NaN or "
        "infinite numbers, clean or drop those rows"
    )


def test_where_nobody_is_finite_it_is_not_the_data_of_some():
    bad = [Refusal(1, "step", i, Reason.NOT_FINITE, "") for i in range(10)]
    exchange = seen(messages())._replace(refusals=bad, admitted=np.zeros(10, bool))
    assert anomalies.observe({}, exchange) == ({}, [])


def test_in_large_cohorts_others_are_compared_every_time():
    windows = [anomalies.window(150, number) for number in range(1, 76)]
    assert {len(one) for one in windows} == {64}
    assert len(np.unique(np.concatenate(windows))) == 150
    assert anomalies.window(64, 3).tolist() == list(range(64))


def test_long_lists_are_shortened():
    assert anomalies.text_of("same", list(range(12)), 0.5).startswith(
        "clients 0, 1, 2, 3, 4, 5, 6, 7 and 4 more send the same messages"
    )
    assert anomalies.text_of("opposed", [2], 0.5).startswith(
        "client 2 points against other clients"
    )
