"""The gate by itself: what is admitted, and the reasons for what is not."""

import jax.numpy as jnp
import numpy as np
import pytest

from simfbo.core.exchange import Reason, Request
from simfbo.core.gate import (
    Gate,
    Reply,
    admit,
    median_norm,
    occurrences,
    squared_norms,
    with_median,
)
from simfbo.core.problem import Point
from simfbo.core.trees import as_arrays, names

MEMBERS = (2, 3, 5, 8, 9)


def request(ids=(3, 8), number=1234):
    like = Point(x={"w": np.zeros((2, 1), "float32")}, y=np.zeros(3, "float32"))
    return Request(number, "step", np.array(ids), like)


def fine(client, number=1234, repeat=0):
    own = np.float32(client if isinstance(client, int) and 0 < client < 100 else 1)
    message = Point(x={"w": np.full((2, 1), own)}, y=np.full(3, 1 / own))
    return Reply(client, number, as_arrays(message), repeat)


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


def with_y(reply, value):
    return changed(reply, **{".y": value})


# What can go wrong with a reply: what arrives in its place, and the reasons given for it.
KINDS = {
    "nan": (lambda r: [put(r, np.nan)], Reason.NOT_FINITE),
    "nan at the end": (lambda r: [put(r, np.nan, -1)], Reason.NOT_FINITE),
    "inf": (lambda r: [put(r, np.inf)], Reason.NOT_FINITE),
    "minus inf": (lambda r: [put(r, -np.inf)], Reason.NOT_FINITE),
    "all nan": (
        lambda r: [changed(r, **{".x['w']": np.full((2, 1), np.float32(np.nan))})],
        Reason.NOT_FINITE,
    ),
    "too large": (lambda r: [put(r, 1e30)], Reason.TOO_LARGE),
    "missing key": (lambda r: [left_out(r, ".x['w']")], Reason.MALFORMED),
    "no keys": (lambda r: [r._replace(arrays={})], Reason.MALFORMED),
    "extra key": (lambda r: [changed(r, more=y_of(r))], Reason.MALFORMED),
    "renamed key": (lambda r: [changed(left_out(r, ".y"), **{".Y": y_of(r)})], Reason.MALFORMED),
    "key is no text": (
        lambda r: [r._replace(arrays={**left_out(r, ".y").arrays, 7: y_of(r)})],
        Reason.MALFORMED,
    ),
    "shape": (lambda r: [with_y(r, np.ones(4, "float32"))], Reason.MALFORMED),
    "rank up": (lambda r: [with_y(r, y_of(r)[None])], Reason.MALFORMED),
    "rank down": (lambda r: [with_y(r, y_of(r)[0])], Reason.MALFORMED),
    "empty": (lambda r: [with_y(r, np.ones(0, "float32"))], Reason.MALFORMED),
    "huge": (lambda r: [with_y(r, np.zeros(100_000, "float32"))], Reason.MALFORMED),
    "dtype wide": (lambda r: [with_y(r, y_of(r).astype("float64"))], Reason.MALFORMED),
    "dtype narrow": (lambda r: [with_y(r, y_of(r).astype("float16"))], Reason.MALFORMED),
    "dtype whole": (lambda r: [with_y(r, y_of(r).astype("int32"))], Reason.MALFORMED),
    "dtype complex": (lambda r: [with_y(r, y_of(r).astype("complex64"))], Reason.MALFORMED),
    "byte order": (lambda r: [with_y(r, y_of(r).astype(">f4"))], Reason.MALFORMED),
    "objects": (lambda r: [with_y(r, y_of(r).astype(object))], Reason.MALFORMED),
    "text": (lambda r: [with_y(r, "0.1 0.2 0.3")], Reason.MALFORMED),
    "a list": (lambda r: [with_y(r, y_of(r).tolist())], Reason.MALFORMED),
    "nothing": (lambda r: [with_y(r, None)], Reason.MALFORMED),
    "no arrays": (lambda r: [r._replace(arrays=None)], Reason.MALFORMED),
    "arrays in a list": (lambda r: [r._replace(arrays=list(r.arrays.values()))], Reason.MALFORMED),
    "stale round": (lambda r: [r._replace(exchange=r.exchange - 1)], Reason.WRONG_EXCHANGE),
    "future round": (lambda r: [r._replace(exchange=r.exchange + 1)], Reason.WRONG_EXCHANGE),
    "round is text": (lambda r: [r._replace(exchange=str(r.exchange))], Reason.WRONG_EXCHANGE),
    "round is not a number": (lambda r: [r._replace(exchange=np.nan)], Reason.WRONG_EXCHANGE),
    "duplicate": (lambda r: [r, r], Reason.DUPLICATE),
    "contradiction": (lambda r: [r, with_y(r, 2 * y_of(r))], Reason.DUPLICATE),
    "unknown client": (lambda r: [r._replace(client=77)], Reason.NOT_REQUESTED),
    "negative client": (lambda r: [r._replace(client=-1)], Reason.NOT_REQUESTED),
    "client is text": (lambda r: [r._replace(client=str(r.client))], Reason.NOT_REQUESTED),
    "client is true": (lambda r: [r._replace(client=True)], Reason.NOT_REQUESTED),
    "another repeat": (lambda r: [r._replace(repeat=1)], Reason.NOT_REQUESTED),
    "not a reply": (lambda r: [r.arrays], Reason.MALFORMED),
    "nothing at all": (lambda r: [None], Reason.MALFORMED),
    "silence": (lambda r: [], Reason.NO_REPLY),
}
STRANGERS = ("unknown client", "negative client", "client is text", "client is true")
SILENT = {*STRANGERS, "another repeat", "not a reply", "nothing at all", "silence", "stale round",
          "future round", "round is text", "round is not a number"}  # fmt: skip
GATE = Gate(max_norm=1e9)


@pytest.mark.parametrize("client", [MEMBERS[0], MEMBERS[-1]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_reply_leaves_what_there_is_without_that_client(kind, client):
    """All others' messages stay as they are, to the bit, wherever the bad one arrives."""
    spoil, reason = KINDS[kind]
    others = [fine(member) for member in MEMBERS if member != client]
    bad = spoil(fine(client))
    found = admit([*bad, *others], request(MEMBERS), GATE)
    assert [message is None for message in found.messages] == [m == client for m in MEMBERS]
    for member, message in zip(MEMBERS, found.messages, strict=True):
        if member != client:
            for name, array in as_arrays(message).items():
                np.testing.assert_array_equal(array, fine(member).arrays[name])
    reasons = [refusal.reason for refusal in found.refusals]
    silent = [Reason.NO_REPLY] if kind in SILENT else []
    assert reasons == [reason] * len(bad) + silent
    assert found.refusals[-1].client == client
    assert all(refusal[:2] == (1234, "step") for refusal in found.refusals)
    again = admit([*others[::-1], *bad[::-1]], request(MEMBERS), GATE)
    assert again.refusals == found.refusals


@pytest.mark.parametrize("kind", ["stale round", "not a reply", "nothing at all", *STRANGERS])
def test_a_stray_next_to_the_true_reply_changes_nothing(kind):
    spoil, reason = KINDS[kind]
    replies = [fine(member) for member in MEMBERS]
    found = admit([*spoil(replies[2]), *replies], request(MEMBERS), Gate())
    assert [refusal.reason for refusal in found.refusals] == [reason]
    for member, message in zip(MEMBERS, found.messages, strict=True):
        np.testing.assert_array_equal(message.y, y_of(fine(member)))


def test_messages_come_in_the_order_of_the_cohort():
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        found = admit([fine(MEMBERS[j]) for j in order], request(MEMBERS), Gate())
        assert found.refusals == []
        assert [int(message.x["w"][0, 0]) for message in found.messages] == list(MEMBERS)


def test_names_and_messages_come_back():
    asked = request()
    assert names(asked.like) == [".x['w']", ".y"]
    admitted = admit([fine(8), fine(3)], asked, Gate())
    assert admitted.refusals == []
    assert [message.x["w"].tolist() for message in admitted.messages] == [[[3], [3]], [[8], [8]]]
    np.testing.assert_allclose(admitted.squares, [[18, 3 / 9], [128, 3 / 64]], rtol=1e-6)


def test_jax_arrays_and_numpy_integers_pass():
    reply = fine(3)._replace(client=np.int64(3), exchange=np.int32(1234))
    reply = reply._replace(arrays={key: jnp.asarray(a) for key, a in reply.arrays.items()})
    assert admit([reply, fine(8)], request(), Gate()).refusals == []


def test_equal_dtypes_pass_though_they_are_two_objects():
    own = np.dtype("float32", metadata={"from": "elsewhere"})
    assert admit([with_y(fine(3), np.ones(3, own)), fine(8)], request(), Gate()).refusals == []


@pytest.mark.parametrize(
    ("reply", "client", "reason", "text"),
    [
        (fine(4), 4, Reason.NOT_REQUESTED, "was not asked"),
        (fine(3, number=1233), 3, Reason.WRONG_EXCHANGE, "answered exchange 1233, not 1234"),
        (fine(3, repeat=1), 3, Reason.NOT_REQUESTED, "was not asked"),
        (fine("3"), None, Reason.NOT_REQUESTED, "was not asked"),
        (5.0, None, Reason.MALFORMED, "sent a float, which is no reply"),
        (
            fine(3)._replace(arrays=None),
            3,
            Reason.MALFORMED,
            "sent a NoneType in place of named arrays",
        ),
        (left_out(fine(3), ".y"), 3, Reason.MALFORMED, "left out .y"),
        (changed(fine(3), z=1), 3, Reason.MALFORMED, "sent 'z', which was not asked for"),
        (with_y(fine(3), "no"), 3, Reason.MALFORMED, "sent a str for .y"),
        (
            with_y(fine(3), np.ones(3)),
            3,
            Reason.MALFORMED,
            "sent float64 numbers for .y, not float32",
        ),
        (
            with_y(fine(3), np.ones(2, "float32")),
            3,
            Reason.MALFORMED,
            "sent shape (2,) for .y, not (3,)",
        ),
        (
            put(fine(3), np.inf),
            3,
            Reason.NOT_FINITE,
            "sent .y that is not finite, or too large to measure",
        ),
    ],
)
def test_texts(reply, client, reason, text):
    found = admit([reply, fine(8)], request(), Gate())
    assert found.messages[0] is None
    assert found.messages[1] is not None
    assert found.refusals[0] == (1234, "step", client, reason, text)


def test_a_norm_is_that_of_all_arrays_and_the_limit_itself_passes():
    """sqrt(2 * 3^2 + 3 * 1/3^2), with the message that the limit is told with."""
    norm = float(np.sqrt(np.asarray(admit([fine(3)], request((3,)), Gate()).squares).sum()))
    assert norm == pytest.approx(np.sqrt(18 + 1 / 3), rel=1e-6)
    assert admit([fine(3)], request((3,)), Gate(max_norm=norm)).refusals == []
    (refusal,) = admit([fine(3)], request((3,)), Gate(max_norm=4.2)).refusals
    assert refusal[3:] == (Reason.TOO_LARGE, "sent a message of norm 4.28, the limit is 4.2")


def test_an_open_gate_lets_any_number_through():
    bad = put(fine(3), np.nan)
    found = admit([bad], request((3,)), Gate(max_norm=1.0, open=True))
    assert found.refusals == []
    assert np.isnan(found.messages[0].y[0])


def test_a_norm_that_overflows_is_refused():
    asked = Request(1, "step", np.array([4]), np.zeros(2))
    (refusal,) = admit([Reply(4, 1, {"": np.full(2, 1e200)})], asked, Gate()).refusals
    assert refusal.reason == Reason.NOT_FINITE


def test_clients_may_have_large_numbers_but_not_too_large():
    asked = request((5, 2**40, 2**62))
    assert admit([fine(5), fine(2**40), fine(2**62)], asked, Gate()).refusals == []
    beyond = admit([fine(2**63), fine(-(2**63)), fine(10**5000)], asked, Gate())
    assert [r.client for r in beyond.refusals[:3]] == [None] * 3


def test_twice_is_refused_twice_and_is_no_silence():
    found = admit([fine(3), fine(8), fine(3)], request(), Gate())
    assert [(r.client, r.text) for r in found.refusals] == [(3, "replied more than once")] * 2


def test_a_late_reply_next_to_the_right_one_does_not_make_two():
    found = admit([fine(3, number=1233), fine(3), fine(8)], request(), Gate())
    assert [r.text for r in found.refusals] == ["answered exchange 1233, not 1234"]
    assert found.messages[0] is not None


def test_silence_comes_last_and_in_order():
    found = admit([fine(9)], request((1, 3, 3)), Gate())
    assert [(r.client, r.text) for r in found.refusals] == [
        (9, "was not asked"), (1, "did not reply"), (3, "did not reply"), (3, "did not reply"),
    ]  # fmt: skip


def test_defaults():
    assert Gate() == Gate(max_norm=None, min_replies=1, open=False)
    assert Reply(3, 5, {}).repeat == 0


def test_repeats_are_numbered():
    ids = np.array([1, 2, 2, 5, 5, 5, 5, 9])
    assert occurrences(ids).tolist() == [0, 0, 1, 0, 1, 2, 3, 0]


def test_a_client_drawn_twice_answers_twice():
    found = admit([fine(3, repeat=1), fine(8), fine(3)], request((3, 3, 8)), Gate())
    assert found.refusals == []
    assert all(message is not None for message in found.messages)


def test_a_bare_array_has_no_name():
    asked = Request(1, "step", np.array([4]), np.zeros(2))
    bad = Reply(4, 1, {"": np.array([0.0, np.nan])})
    (refusal,) = admit([bad], asked, Gate()).refusals
    assert refusal.text == "sent a message that is not finite, or too large to measure"
    texts = [admit([Reply(4, 1, arrays)], asked, Gate()).refusals[0].text for arrays in (
        {}, {"": 3}, {"": np.zeros(2, int)}, {"": np.zeros(3)})]  # fmt: skip
    assert texts == [
        "left out its array",
        "sent a int for its array",
        "sent int64 numbers for its array, not float64",
        "sent shape (3,) for its array, not (2,)",
    ]


def test_refusals_come_in_the_order_of_clients_those_unknown_first():
    strays = [fine(7), fine(0), "what", fine(1)]
    found = admit([*strays, fine(3), fine(8)], request(), Gate())
    assert [refusal.client for refusal in found.refusals] == [None, 0, 1, 7]
    again = admit([fine(8), *strays[::-1], fine(3)], request(), Gate())
    assert again.refusals == found.refusals
    found = admit([left_out(fine(0), ".y"), fine("3"), fine(8)], request((0, 8)), Gate())
    assert [refusal.client for refusal in found.refusals] == [None, 0]


def test_a_coded_message_is_bytes():
    arrays = fine(3).arrays
    replies = [Reply(3, 1234, b"coded"), fine(8)]
    found = admit(replies, request(), Gate(), decode=lambda position, message: arrays)
    assert found.messages[0] is not None
    assert [(r.client, r.text) for r in found.refusals] == [
        (8, "sent a dict in place of a coded message")
    ]


def test_an_empty_message_has_no_norms():
    assert squared_norms(()).shape == (0,)


def test_the_median_norm_is_that_of_finite_messages_other_than_zero():
    squares = np.array([[1.0], [np.inf], [0.0], [np.nan], [9.0], [0.0]])
    assert median_norm(squares) == 2.0
    assert median_norm(squares[1:4]) == 0.0
    assert with_median([2.0], 0.5) == [2.0, 0.5]
    assert with_median([2.0], 0.0) == [2.0]
