"""Standard output that is ASCII only, closed, full, or read by nobody any more."""

import codecs
import contextlib
import errno
import io
import os
import sys
from collections.abc import Generator

from simfbo.errors import UserError

_ASCII = {"±": "+-", "–": "-", "−": "-", "…": "...", "²": "^2", "∇": "grad ",  # noqa: RUF001
          "Φ": "Phi", "τ": "tau", "η": "eta", "√": "sqrt ", "▁": "_", "▂": ".", "▃": "-",
          "▄": ":", "▅": "=", "▆": "+", "▇": "*", "█": "#"}  # fmt: skip

_NOBODY = (errno.EPIPE, errno.EIO)  # a pipe or a terminal that was closed
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Gone(Exception):
    """Whoever read standard output has left."""


def prepare() -> None:
    """Let the standard streams take any text, and stand in for those that the caller has closed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # another file would get its number, and whatever libraries print
            os.open(os.devnull, os.O_RDWR)
    codecs.register_error("simfbo", _readable)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="simfbo")


def _readable(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return what stands for characters that an encoding lacks, and where these end."""
    if isinstance(error, UnicodeEncodeError):
        text = error.object[error.start]
        if "\udc80" <= text <= "\udcff":  # how Python reads a file name of other bytes
            return bytes([ord(text) - 0xDC00]), error.start + 1
        if text in _ASCII:
            return _ASCII[text], error.start + 1
    return codecs.backslashreplace_errors(error)


@contextlib.contextmanager
def complete() -> Generator[None]:
    """Notice within the block and at its end whether standard output can be written.

    Raises:
        Gone: nobody reads it any more.
        UserError: it cannot be written for another reason, such as a full disk.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in (*_NOBODY, *_FULL):
            raise  # from a file, or from a network
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # for what Python writes at its end
        if error.errno in _NOBODY:
            raise Gone from None
        raise UserError(f"Standard output cannot be written: {error.strerror}.") from None
