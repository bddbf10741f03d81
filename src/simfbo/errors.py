"""The errors a user can meet, and how values are quoted in their messages."""

import importlib
from types import ModuleType
from typing import Any


class UserError(ValueError):
    """An error that the user can correct; the message is one sentence that says how."""


class ResumableError(UserError):
    """A failure of a run that can be continued from its folder.

    The message is for Python; other front ends build their own from the attributes.

    Attributes:
        advice: the message up to "continue the run".
        directory: the run's folder.
    """

    def __init__(self, advice: str, directory: Any) -> None:
        """Take a text that ends before "continue the run", and the run's folder."""
        super().__init__(advice, directory)  # the arguments with which pickle restores it
        self.advice, self.directory = advice, directory

    def __str__(self) -> str:
        return f"{self.advice} continue the run with resume=True."


class BadMessage(ValueError):
    """Bytes that are not a valid message; the text completes "sent ..."."""


class MissingExtra(UserError):
    """An optional dependency is not installed; the message has the command that installs it."""


class ClientError(RuntimeError):
    """A client step failed; the message names the client and the step."""


class ClientWarning(UserWarning):
    """Some clients' messages stand out and may be hostile or broken; the run continues."""


class NeedsHost(Exception):
    """A round cannot be compiled; the text gives the reason."""


class TooFewReplies(RuntimeError):
    """Fewer replies passed the gate than an exchange needs.

    Attributes:
        exchange: the exchange, with the rejected replies.
    """

    def __init__(self, left: int, exchange: Any) -> None:
        """State how many replies are left, and why the first one was rejected."""
        self.exchange = exchange
        request = exchange.request
        why = "".join(f": client {one.client} {one.text}" for one in exchange.refusals[:1])
        super().__init__(
            f"only {left} of {len(request.ids)} replies to '{request.client_step}' count{why}"
        )


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or raise with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(missing(module, extra)) from None


def missing(module: str, extra: str) -> str:
    """Return the message for an optional dependency that is not installed.

    Example:
        >>> missing("matplotlib.figure", "plots")
        "This needs matplotlib, which is not installed: pip install 'simfbo[plots]'."
    """
    packages = {
        "sklearn": "scikit-learn",
        "PIL": "Pillow",
        "flwr": "Flower",
        "dp_accounting": "dp-accounting",
    }
    top = module.partition(".")[0]
    name = packages.get(top, top)
    return f"This needs {name}, which is not installed: pip install 'simfbo[{extra}]'."


def plain(text: str, longest: int = 80) -> str:
    r"""Return a text on one line, shortened in the middle.

    Example:
        >>> plain("one\ntwo")
        'one\\ntwo'
    """
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= longest else f"{text[: longest - 13]}...{text[-10:]}"


def brief(value: Any) -> str:
    """Return a value's representation, shortened to fit into a sentence.

    Example:
        >>> brief([1] * 1000)
        '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,..., 1, 1, 1]'
    """
    try:
        return plain(repr(value))
    except (ValueError, RecursionError):  # integers of thousands of digits, deeply nested lists
        return "a value too long to show"


def unusable(error: OSError) -> str:
    """Return the message for a file that cannot be read or written.

    Example:
        >>> unusable(OSError(28, "No space left on device", "it/figure.png"))
        'it/figure.png cannot be used: No space left on device.'
    """
    return f"{plain(str(error.filename), 1000)} cannot be used: {error.strerror}."
