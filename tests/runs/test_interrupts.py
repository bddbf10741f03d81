"""Signals are raised where they may be, noted elsewhere, and never lost."""

import contextlib
import signal
import sys
import threading
import time

import pytest

from simfbo.runs.interrupts import Interrupts, held_back, install


@pytest.fixture(autouse=True)
def ctrl_c():
    """Begin with Python's own handler, which a background shell takes away."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def press():
    signal.raise_signal(signal.SIGINT)


def test_a_signal_waits_for_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012
        press()
        done.append("held back")
    assert done == ["held back"]


def test_where_it_is_allowed_it_raises():
    with held_back() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            press()
        press()  # what answers it is left in peace
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            pytest.fail("the second signal raises at once")


def test_after_an_interruption_nothing_else_is_raised():
    with held_back() as interrupts:
        with contextlib.suppress(KeyboardInterrupt), interrupts.allowed():
            press()
        press()


def test_an_error_is_not_hidden():
    with pytest.raises(ValueError, match="other"), held_back() as interrupts:  # noqa: PT012
        with interrupts.allowed():
            pass
        raise ValueError("other")


def test_blocks_within_blocks():
    with held_back() as outer:
        with outer.allowed(), held_back() as inner:
            assert inner is outer
            assert not inner.open
        with pytest.raises(KeyboardInterrupt), outer.allowed():  # noqa: PT012
            with held_back():
                press()
            pytest.fail("it raises when the inner block ends")


class Dropping:
    """Its destructor is interrupted, where Python can only print the interruption."""

    def __del__(self):
        press()


def test_what_a_destructor_drops_is_raised_again(capsys):
    with held_back() as interrupts:
        with contextlib.suppress(KeyboardInterrupt), interrupts.allowed():
            Dropping()
            time.sleep(200)
            pytest.fail("it was lost")
        assert interrupts.raised
    assert capsys.readouterr().err == ""


def test_a_signal_that_arrives_while_a_dropped_one_is_reported_is_not_lost(monkeypatch):
    """As on a busy machine, where the second one may come before the report ends."""
    plain = threading.Timer

    class Early:
        def __init__(self, *given):
            monkeypatch.setattr(threading, "Timer", plain)

        def start(self):
            press()

    monkeypatch.setattr(threading, "Timer", Early)
    with held_back() as interrupts, contextlib.suppress(KeyboardInterrupt), interrupts.allowed():
        Dropping()
        time.sleep(30)
        pytest.fail("it was lost")


def test_other_errors_of_destructors_are_reported_as_ever(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: seen.append(dropped.exc_type))

    class Broken:
        def __del__(self):
            raise ValueError

    with held_back():
        Broken()
    assert seen == [ValueError]


def test_the_third_signal_is_the_last():
    ended = []
    interrupts = Interrupts(lambda: ended.append(True))
    restore = install(interrupts, signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            press()
        press()
        assert not ended
        press()
        assert ended
    finally:
        restore()


def test_signals_of_the_system_may_come_again_and_again():
    ended = []
    interrupts = Interrupts(lambda: ended.append(True))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    restore = install(interrupts, signal.SIGHUP)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        for _ in range(5):
            signal.raise_signal(signal.SIGHUP)
        assert not ended
    finally:
        restore()
        signal.signal(signal.SIGHUP, before)


def test_other_handlers_and_threads_are_left_alone():
    def own(number, frame):
        raise OSError("mine")

    signal.signal(signal.SIGINT, own)
    with pytest.raises(OSError, match="mine"), held_back() as interrupts, interrupts.allowed():
        press()
    assert signal.getsignal(signal.SIGINT) is own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = []

    def elsewhere():
        with held_back() as interrupts, interrupts.allowed():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
