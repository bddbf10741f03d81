"""Robust standard output: ASCII only, closed, full, or with a broken pipe."""

import codecs
import contextlib
import errno
import io
import os
import sys
from collections.abc import Generator

from simfbo.errors import UserError

_ASCII = {
    "±": "+-",
    "–": "-",  # noqa: RUF001
    "−": "-",  # noqa: RUF001
    "…": "...",
    "²": "^2",
    "∇": "grad ",
    "Φ": "Phi",
    "τ": "tau",
    "η": "eta",
    "√": "sqrt ",
    "▁": "_",
    "▂": ".",
    "▃": "-",
    "▄": ":",
    "▅": "=",
    "▆": "+",
    "▇": "*",
    "█": "#",
}

_CLOSED = (errno.EPIPE, errno.EIO)  # a pipe or a terminal that was closed
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Gone(Exception):
    """The reader of standard output has closed it."""


def prepare() -> None:
    """Make the standard streams accept any text, and replace closed ones."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # else the next file opened would get this number, and libraries' output
            os.open(os.devnull, os.O_RDWR)
    codecs.register_error("simfbo", _readable)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="simfbo")


def _readable(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace characters that the encoding lacks; return the text and the next position."""
    if isinstance(error, UnicodeEncodeError):
        text = error.object[error.start]
        if "\udc80" <= text <= "\udcff":  # an undecodable byte of a file name
            return bytes([ord(text) - 0xDC00]), error.start + 1
        if text in _ASCII:
            return _ASCII[text], error.start + 1
    return codecs.backslashreplace_errors(error)


@contextlib.contextmanager
def complete() -> Generator[None]:
    """Check within the block and at its end that standard output can be written.

    Raises:
        Gone: if its reader has closed it.
        UserError: for another reason, such as a full disk.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in (*_CLOSED, *_FULL):
            raise  # from a file, or from a network
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # for Python's flush at exit
        if error.errno in _CLOSED:
            raise Gone from None
        raise UserError(f"Standard output cannot be written: {error.strerror}.") from None
