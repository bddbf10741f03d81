"""The laws that an algorithm must obey, as checks for your own algorithm.

A law is a function that takes an algorithm's factory, runs it on small quadratics with a closed
form in double precision, and returns a number that must not exceed a limit. A method that breaks a
law by construction declares it in `Method.known_violations`; the check then requires that the law
is broken.

The factory is called as `factory(problem, local, server)` with step sizes for x, y and v:
the clients' and the server's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from simfbo.checks import _laws, _memory_laws
from simfbo.checks._law import GAMMA, Factory, Law, small_task
from simfbo.codecs import Codec
from simfbo.codecs import laws as codec_laws

__all__ = [
    "CODEC_LAWS",
    "LAWS",
    "MEMORY_LAWS",
    "SINGLE_LOOP_LAWS",
    "CheckError",
    "Finding",
    "Law",
    "check_algorithm",
    "check_codec",
    "describe",
    "examine",
    "remembers",
]

LAWS = _laws.LAWS
"""The laws that every algorithm must obey, or declare in `known_violations`."""

SINGLE_LOOP_LAWS = _laws.SINGLE_LOOP_LAWS
"""Further laws, for single-loop methods with steps of clients and server, as SimFBO."""

MEMORY_LAWS = _memory_laws.MEMORY_LAWS
"""Further laws, for methods with stateful clients (`Method.client_memory`)."""

CODEC_LAWS = codec_laws.CODEC_LAWS
"""The laws that codecs must obey; see `check_codec`."""


class Finding(NamedTuple):
    """The outcome of one law.

    Attributes:
        law: the law.
        measured: the number measured.
        passed: whether the law holds, or is violated as declared.
        violation: the reason, if the algorithm declares that it violates the law.
    """

    law: Law
    measured: float
    passed: bool
    violation: str | None


class CheckError(AssertionError):
    """An algorithm broke laws; the message lists them."""


def check_algorithm(factory: Factory, laws: Sequence[Law] | None = None) -> list[Finding]:
    """Test an algorithm against laws; raise `CheckError` if one is broken.

    Args:
        factory: called as `factory(problem, local, server)`; returns the algorithm.
        laws: which to test; `LAWS` by default. `SINGLE_LOOP_LAWS` hold for SimFBO's family.

    Returns:
        A finding per law, with the number measured.

    Example:
        >>> from simfbo.algorithms import simfbo
        >>> [finding.passed for finding in check_algorithm(simfbo, [LAWS[0]])]
        [True]
    """
    findings = [examine(factory, law) for law in (LAWS if laws is None else laws)]
    broken = [f for f in findings if not f.passed]
    if broken:
        raise CheckError("\n".join(map(describe, broken)))
    return findings


def check_codec(codec: Codec) -> dict[str, float]:
    """Test a codec against `CODEC_LAWS`; raise `CheckError` if it breaks one.

    A biased codec must break the law "unbiased".

    Args:
        codec: the codec.

    Returns:
        The number measured for each law, by name.

    Example:
        >>> from simfbo import codecs
        >>> check_codec(codecs.float32())["variance"]
        0.0
    """
    measured = {law.name: law.measure(codec) for law in CODEC_LAWS}
    broken = [
        f"{law.name}: {law.says} (measured {measured[law.name]:.2g}, limit {law.limit:.2g})."
        for law in CODEC_LAWS
        if (measured[law.name] <= law.limit) == (law.name == "unbiased" and not codec.unbiased)
    ]
    if broken:
        raise CheckError("\n".join(broken))
    return measured


def remembers(factory: Factory) -> bool:
    """Check whether an algorithm has stateful clients."""
    return factory(small_task().problem, GAMMA, GAMMA).has_memory


def examine(factory: Factory, law: Law) -> Finding:
    """Test an algorithm against one law."""
    with jax.enable_x64(True):
        violation = factory(small_task().problem, GAMMA, GAMMA).known_violations.get(law.name)
        measured = float(law.measure(factory))
    holds = bool(measured <= law.limit)
    return Finding(law, measured, holds if violation is None else not holds, violation)


def describe(finding: Finding) -> str:
    """Describe a finding in one sentence."""
    law = finding.law
    numbers = f"measured {finding.measured:.2g}, limit {law.limit:.2g}"
    if finding.violation and not finding.passed:
        return f"{law.name}: declared as violated ({finding.violation}) but it holds ({numbers})."
    if finding.violation:
        return f"{law.name}: violated as declared: {finding.violation} ({numbers})."
    return f"{law.name}: {law.says} ({numbers})."
