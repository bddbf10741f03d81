"""Ctrl-C, SIGTERM and the like: raised where a run can end in order, noted everywhere else.

Python raises `KeyboardInterrupt` wherever the program happens to be: within a save, in what answers
an earlier one, or in a destructor, where it is printed and lost. Under `Interrupts` one signal
raises, and what answers it is not interrupted again.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

# What ends a command in order: closed terminals send SIGHUP, batch systems SIGUSR1 and SIGXCPU.
# The first ones reach all processes of a command at once, and are its parent's to answer.
TO_GROUPS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
TO_PROCESSES = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGXCPU") if hasattr(signal, name)
)
SIGNALS = (*TO_GROUPS, *TO_PROCESSES)
_BY_HAND = (signal.SIGINT, signal.SIGTERM)  # the others may come again and again
_IMPATIENT = 3  # of these
_SOON = 0.01  # seconds, after which a destructor has ended


class Interrupts:
    """A signal handler: one signal raises `KeyboardInterrupt`, later ones are noted.

    Attributes:
        open: whether the next signal raises.
        raised: whether one has raised.
        noted: whether there was one that has not raised.
    """

    def __init__(self, at_last: Callable[[], object] = lambda: None) -> None:
        """Begin open; the third signal sent by hand, and any later one, calls `at_last`."""
        self.open, self.raised, self.noted = True, False, False
        self._seen, self._number, self._at_last = 0, int(signal.SIGINT), at_last

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Answer a signal."""
        if _is_in_hook(frame):  # where an exception would be lost
            self._send_soon(number)
            return
        self._number, self.noted = number, True
        if number in _BY_HAND:
            self._seen += 1
            if self._seen >= _IMPATIENT:
                self._at_last()
        if self.open:
            self._interrupt()

    def _interrupt(self) -> None:
        """Raise, and leave whoever catches it in peace."""
        self.open, self.raised, self.noted = False, True, False
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def allowed(self) -> Generator[None]:
        """Let a signal raise within the block; one that was noted before raises at once."""
        try:
            self.open = True
            if self.noted:
                self._interrupt()
            yield
        finally:
            self.open = False

    @contextlib.contextmanager
    def closed(self) -> Generator[None]:
        """Note signals within the block; one that has found no place to raise does so after it."""
        before, self.open = self.open, False
        try:
            yield
        finally:
            self.open = before and not self.raised
        if self.noted and self.open:
            self._interrupt()

    def rescue(self, dropped: "sys.UnraisableHookArgs") -> bool:
        """Raise again what a destructor or a callback has dropped; return whether it was ours."""
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            return False
        self.open, self._seen = True, self._seen - (self._number in _BY_HAND)
        self._send_soon(self._number)
        return True

    def _send_soon(self, number: int) -> None:
        """Send the main thread a signal."""
        main = threading.main_thread().ident or 0
        threading.Timer(_SOON, signal.pthread_kill, (main, number)).start()


def _is_in_hook(frame: FrameType | None) -> bool:
    """Decide whether a signal arrived while a dropped exception was being reported."""
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) == (__file__, "rescue"):
            return True
        frame = frame.f_back
    return False


class _Ungoverned(Interrupts):
    """Where signals are not ours to handle: nothing is held back."""

    @contextlib.contextmanager
    def allowed(self) -> Generator[None]:
        """Change nothing."""
        yield


@contextlib.contextmanager
def held_back() -> Generator[Interrupts]:
    """Hold Ctrl-C back within the block, except where it is `allowed`.

    This is so in the main thread, unless the program has a handler of its own.
    """
    handlers: list[Any] = [signal.getsignal(number) for number in SIGNALS]
    ours = [handler for handler in handlers if isinstance(handler, Interrupts)]
    if threading.current_thread() is not threading.main_thread():
        yield _Ungoverned()
    elif ours:
        with ours[0].closed():
            yield ours[0]
    elif handlers[0] is signal.default_int_handler:
        own = Interrupts()
        restore = install(own, signal.SIGINT)
        try:
            with own.closed():
                yield own
        finally:
            restore()
    else:
        yield _Ungoverned()


def install(interrupts: Interrupts, *signals: signal.Signals) -> Callable[[], None]:
    """Handle signals by `interrupts` from now on, in the main thread; return what undoes it."""
    before, hook = {number: signal.getsignal(number) for number in signals}, sys.unraisablehook

    def rescue(dropped: "sys.UnraisableHookArgs") -> None:
        if not interrupts.rescue(dropped):
            hook(dropped)

    def restore() -> None:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)

    sys.unraisablehook = rescue
    for number in signals:
        signal.signal(number, interrupts)
    return restore
