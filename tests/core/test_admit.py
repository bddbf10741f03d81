"""The gate by itself: what is admitted, and the reasons for what is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import DebugFederation, SimulatedFederation, UserError, from_clients
from simfbo.core.federation import Exchange
from simfbo.core.gate import Asked, Gate, Reply, admit, as_arrays, names, occurrences
from simfbo.core.problem import Point


def changed(reply, **parts):
    return reply._replace(arrays={**reply.arrays, **parts})


def left_out(reply, name):
    return reply._replace(arrays={key: a for key, a in reply.arrays.items() if key != name})


def ask(ids=(3, 8), number=5):
    like = Point(x={"w": np.zeros((2, 1), "float32")}, y=np.zeros(3, "float32"))
    return Asked(number, "work", np.array(ids), like)


def fine(client, number=5, repeat=0):
    message = Point(x={"w": np.ones((2, 1), "float32")}, y=np.ones(3, "float32"))
    return Reply(client, number, as_arrays(message), repeat)


def test_names_and_messages_come_back():
    asked = ask()
    assert names(asked.like) == [".x['w']", ".y"]
    admitted = admit([fine(8), fine(3)], asked, Gate())
    assert admitted.refusals == []
    assert [message.y.tolist() for message in admitted.messages] == [[1, 1, 1]] * 2
    np.testing.assert_array_equal(admitted.squares, [[2, 3]] * 2)


def test_jax_arrays_and_numpy_integers_pass():
    reply = fine(3)._replace(client=np.int64(3), exchange=np.int32(5))
    reply = reply._replace(arrays={key: jnp.asarray(a) for key, a in reply.arrays.items()})
    assert admit([reply, fine(8)], ask(), Gate()).refusals == []


@pytest.mark.parametrize(
    ("reply", "client", "reason"),
    [
        (fine(4), 4, "was not asked"),
        (fine(3, number=4), 3, "answered exchange 4, not 5"),
        (fine(3, repeat=1), 3, "was not asked"),
        (fine("3"), None, "was not asked"),
        (5.0, None, "sent a float, which is no reply"),
        (fine(3)._replace(arrays=None), 3, "sent a NoneType in place of named arrays"),
        (left_out(fine(3), ".y"), 3, "left out .y"),
        (changed(fine(3), z=1), 3, "sent 'z', which was not asked for"),
        (changed(fine(3), **{".y": "no"}), 3, "sent a str for .y"),
        (changed(fine(3), **{".y": np.ones(3)}), 3, "sent float64 numbers for .y, not float32"),
        (changed(fine(3), **{".y": np.ones(2, "float32")}), 3, "sent shape (2,) for .y, not (3,)"),
    ],
)
def test_reasons(reply, client, reason):
    found = admit([reply, fine(8)], ask(), Gate())
    assert found.messages[0] is None
    assert found.messages[1] is not None
    assert found.refusals[0] == (5, "work", client, reason)


def test_clients_may_have_large_numbers_but_not_too_large():
    asked = ask((5, 2**40, 2**62))
    assert admit([fine(5), fine(2**40), fine(2**62)], asked, Gate()).refusals == []
    beyond = admit([fine(2**63), fine(-(2**63)), fine(10**5000)], asked, Gate())
    assert [r.client for r in beyond.refusals[:3]] == [None] * 3


def test_twice_is_refused_twice_and_is_no_silence():
    found = admit([fine(3), fine(8), fine(3)], ask(), Gate())
    assert [(r.client, r.reason) for r in found.refusals] == [(3, "replied more than once")] * 2


def test_a_late_reply_beside_the_right_one_does_not_make_two():
    found = admit([fine(3, number=4), fine(3), fine(8)], ask(), Gate())
    assert [r.reason for r in found.refusals] == ["answered exchange 4, not 5"]
    assert found.messages[0] is not None


def test_silence_is_told_last_and_in_order():
    found = admit([fine(9)], ask((1, 3, 3)), Gate())
    assert [(r.client, r.reason) for r in found.refusals] == [
        (9, "was not asked"), (1, "did not reply"), (3, "did not reply"), (3, "did not reply"),
    ]  # fmt: skip


def test_the_loudest_is_one_that_counts():
    squares = np.array([[1.0, 2.0], [np.nan, 0.0], [4.0, 0.0]])
    asked = Asked(1, "work", np.array([5, 6, 7]), ())
    assert Exchange(asked, np.array([True, False, True]), squares, []).loudest == 7
    assert Exchange(asked, np.array([True, True, True]), squares, []).loudest == 6
    assert Exchange(asked, np.zeros(3, bool), squares, []).loudest == 6


@pytest.mark.parametrize("engine", [SimulatedFederation, DebugFederation])
def test_the_absent_are_not_measured_and_complex_numbers_are_not_sent(engine):
    data = from_clients([np.ones((1, 1))] * 3, [np.ones((1, 1))] * 3)

    def work(payload, client):
        return Point(y=jnp.ones(2, payload.dtype))

    federation = engine(data, absence=lambda key, ids: ids == 1)
    cohort = federation.cohort(jax.random.key(0))
    federation.aggregate(work, np.ones(()), cohort, jax.random.key(0))
    np.testing.assert_array_equal(federation.latest.squares, [[2], [0], [2]])
    with pytest.raises(UserError, match="'work' returns complex128 numbers: return floats"):
        federation.aggregate(work, np.ones((), complex), cohort, jax.random.key(0))


def test_defaults():
    assert Gate() == Gate(max_norm=None, min_replies=1)
    assert Reply(3, 5, {}).repeat == 0


def test_repeats_are_numbered():
    ids = np.array([1, 2, 2, 5, 5, 5, 5, 9])
    assert occurrences(ids).tolist() == [0, 0, 1, 0, 1, 2, 3, 0]


def test_a_bare_array_has_no_name():
    asked = Asked(1, "work", np.array([4]), np.zeros(2))
    bad = Reply(4, 1, {"": np.array([0.0, np.nan])})
    (refusal,) = admit([bad], asked, Gate()).refusals
    assert refusal.reason == "sent a message that is not finite, or too large to measure"
    reasons = [admit([Reply(4, 1, arrays)], asked, Gate()).refusals[0].reason for arrays in (
        {}, {"": 3}, {"": np.zeros(2, int)}, {"": np.zeros(3)})]  # fmt: skip
    assert reasons == [
        "left out its array",
        "sent a int for its array",
        "sent int64 numbers for its array, not float64",
        "sent shape (3,) for its array, not (2,)",
    ]


def test_refusals_come_in_the_order_of_clients_those_unknown_first():
    strays = [fine(7), fine(0), "what", fine(1)]
    found = admit([*strays, fine(3), fine(8)], ask(), Gate())
    assert [refusal.client for refusal in found.refusals] == [None, 0, 1, 7]
    again = admit([fine(8), *strays[::-1], fine(3)], ask(), Gate())
    assert again.refusals == found.refusals
