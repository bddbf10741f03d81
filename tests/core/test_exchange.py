"""Exchanges: the kinds of refusal, and what is told from who was left out."""

import numpy as np
import pytest

from simfbo.core.exchange import Exchange, Reason, Refusal, Request

VALUES = {
    "NO_REPLY": "no-reply",
    "TIMED_OUT": "timed-out",
    "NODE_AWAY": "node-away",
    "NODE_FAILED": "node-failed",
    "NOT_REQUESTED": "not-requested",
    "WRONG_EXCHANGE": "wrong-exchange",
    "DUPLICATE": "duplicate",
    "MALFORMED": "malformed",
    "NOT_FINITE": "not-finite",
    "TOO_LARGE": "too-large",
    "REFUSED_BY_NODE": "refused-by-node",
}


def test_reasons_are_what_histories_store():
    assert {name: str(reason) for name, reason in Reason.__members__.items()} == VALUES
    assert Reason("too-large") is Reason.TOO_LARGE


def test_every_reason_has_a_text_of_its_own():
    texts = [reason.text for reason in Reason]
    assert len(set(texts)) == len(Reason)
    assert all(text and not text.endswith(".") for text in texts)  # continued after a name
    assert Reason.NO_REPLY.text == "did not reply"


def test_silent_is_who_sent_nothing():
    silent = {Reason.NO_REPLY, Reason.TIMED_OUT, Reason.NODE_AWAY, Reason.NODE_FAILED}
    assert {reason for reason in Reason if reason.silent} == silent
    assert {reason for reason in Reason if reason.text.startswith("did not reply")} == silent


def exchange(admitted, squares, ids=None):
    members = np.arange(len(admitted)) if ids is None else np.array(ids)
    request = Request(1, "step", members, np.zeros(1))
    return Exchange(request, np.array(admitted), np.array(squares, float), [])


@pytest.mark.parametrize(
    ("admitted", "squares", "oversized"),
    [
        ([True, True, True], [[1], [1], [1]], False),  # nobody is left out
        ([False, False, False], [[0], [0], [0]], False),  # nobody came
        ([False, False, False], [[np.nan], [np.inf], [1e9]], True),
        ([False, False, False], [[np.nan], [0], [0]], False),  # most never came
        ([False, False, False], [[np.nan], [9], [0]], True),
        ([False, False], [[np.nan], [0]], False),  # a half is not most
        ([True, False], [[5], [np.inf]], True),  # only those left out are asked about
        ([True, False], [[np.inf], [0]], False),
        ([False], [[0, np.nan]], True),  # any leaf will do
    ],
)
def test_mostly_oversized_is_most_of_those_left_out(admitted, squares, oversized):
    assert exchange(admitted, squares).mostly_oversized is oversized


def test_the_largest_sender_is_one_that_counts():
    squares, ids = [[1.0, 2.0], [np.nan, 0.0], [4.0, 0.0]], [5, 6, 7]
    assert exchange([True, False, True], squares, ids).largest_sender == 7
    assert exchange([True, True, True], squares, ids).largest_sender == 6
    assert exchange([False, False, False], squares, ids).largest_sender == 6


@pytest.mark.parametrize(
    ("admitted", "factor"), [([True] * 4, 1), ([True] * 3 + [False], 4 / 3), ([False] * 4, 4)]
)
def test_the_factor_is_asked_over_admitted(admitted, factor):
    assert exchange(admitted, np.ones((4, 1))).factor == factor


def test_a_refusal_says_what_and_why():
    refusal = Refusal(3, "step", 8, Reason.NOT_FINITE, "sent .y that is not finite")
    assert refusal._asdict() == {
        "exchange": 3,
        "client_step": "step",
        "client": 8,
        "reason": "not-finite",
        "text": "sent .y that is not finite",
    }
