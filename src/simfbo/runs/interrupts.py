"""Ctrl-C, SIGTERM and similar signals: raised where a run can be interrupted, deferred elsewhere.

Python raises `KeyboardInterrupt` at any point of the program: during a save, in the handler of an
earlier one, or in a destructor, where it is printed and dropped. With `Interrupts` one signal
raises, and its handling is not interrupted by further ones.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

# Signals that interrupt a command: closed terminals send SIGHUP, batch systems SIGUSR1 and SIGXCPU.
# The first group reaches all processes of a command at once, and is handled by the parent.
TO_GROUPS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
TO_PROCESSES = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGXCPU") if hasattr(signal, name)
)
SIGNALS = (*TO_GROUPS, *TO_PROCESSES)
_BY_HAND = (signal.SIGINT, signal.SIGTERM)  # systems may send the others repeatedly
_FORCED_AFTER = 3  # signals sent by hand
_DELAY = 0.01  # seconds, longer than a destructor takes


class Interrupts:
    """A signal handler: one signal raises `KeyboardInterrupt`, later ones are recorded.

    Attributes:
        open: the next signal raises.
        raised: a signal has raised.
        noted: a signal is pending.
    """

    def __init__(self, at_last: Callable[[], object] = lambda: None) -> None:
        """Create an open handler; from the third signal sent by hand it calls `at_last`."""
        self.open, self.raised, self.noted = True, False, False
        self._seen, self._number, self._at_last = 0, int(signal.SIGINT), at_last

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if _is_in_hook(frame):  # where an exception would be dropped
            self._send_soon(number)
            return
        self._number, self.noted = number, True
        if number in _BY_HAND:
            self._seen += 1
            if self._seen >= _FORCED_AFTER:
                self._at_last()
        if self.open:
            self._interrupt()

    def _interrupt(self) -> None:
        """Raise KeyboardInterrupt once; ignore further signals until it is handled."""
        self.open, self.raised, self.noted = False, True, False
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def allowed(self) -> Generator[None]:
        """Allow a signal to raise within the block; a pending one raises at once."""
        try:
            self.open = True
            if self.noted:
                self._interrupt()
            yield
        finally:
            self.open = False

    @contextlib.contextmanager
    def closed(self) -> Generator[None]:
        """Defer signals within the block; a pending one raises after it."""
        was_open, self.open = self.open, False
        try:
            yield
        finally:
            self.open = was_open and not self.raised
        if self.noted and self.open:
            self._interrupt()

    def rescue(self, dropped: "sys.UnraisableHookArgs") -> bool:
        """Resend a signal whose KeyboardInterrupt was dropped, e.g. by a destructor.

        Returns:
            False if the dropped exception was another one.
        """
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            return False
        self.open, self._seen = True, self._seen - (self._number in _BY_HAND)
        self._send_soon(self._number)
        return True

    def _send_soon(self, number: int) -> None:
        """Send a signal to the main thread after a delay."""
        main = threading.main_thread().ident or 0
        threading.Timer(_DELAY, signal.pthread_kill, (main, number)).start()


def _is_in_hook(frame: FrameType | None) -> bool:
    """Check if a signal arrived while a dropped exception was being reported."""
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) == (__file__, "rescue"):
            return True
        frame = frame.f_back
    return False


class _NotInstalled(Interrupts):
    """Stands for the handlers of the program, or of other threads, which are left unchanged."""

    @contextlib.contextmanager
    def allowed(self) -> Generator[None]:
        """Do nothing."""
        yield


@contextlib.contextmanager
def held_back() -> Generator[Interrupts]:
    """Defer Ctrl-C within the block, except where it is `allowed`.

    Does nothing outside the main thread, or if the program has installed another handler.
    """
    handlers: list[Any] = [signal.getsignal(number) for number in SIGNALS]
    installed = [handler for handler in handlers if isinstance(handler, Interrupts)]
    if threading.current_thread() is not threading.main_thread():
        yield _NotInstalled()
    elif installed:
        with installed[0].closed():
            yield installed[0]
    elif handlers[0] is signal.default_int_handler:
        interrupts = Interrupts()
        restore = install(interrupts, signal.SIGINT)
        try:
            with interrupts.closed():
                yield interrupts
        finally:
            restore()
    else:
        yield _NotInstalled()


def install(interrupts: Interrupts, *signals: signal.Signals) -> Callable[[], None]:
    """Install a handler in the main thread; return a function that restores the previous ones."""
    previous, hook = {number: signal.getsignal(number) for number in signals}, sys.unraisablehook

    def rescue(dropped: "sys.UnraisableHookArgs") -> None:
        if not interrupts.rescue(dropped):
            hook(dropped)

    def restore() -> None:
        sys.unraisablehook = hook
        for number, handler in previous.items():
            signal.signal(number, handler)

    sys.unraisablehook = rescue
    for number in signals:
        signal.signal(number, interrupts)
    return restore
