"""`simfbo check`: try the laws that an algorithm must obey."""

import argparse
import contextlib

from simfbo.cli.console import OUT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `check`."""
    add = parser.add_argument
    add("factory", metavar="NAME", help="one of ours, such as fednest, or package.module:factory, "
        "called with (problem, local, server) or (problem, steps)")  # fmt: skip
    add("--single-loop", action="store_true",
        help="also the laws of SimFBO's family (SOBA, eta, sampling, drift)")  # fmt: skip


def call(options: argparse.Namespace) -> int:
    """Run the command with parsed arguments."""
    return check(options.factory, options.single_loop)


def check(name: str, single_loop: bool) -> int:
    """Try the laws on a method; return 1 if one is broken."""
    from simfbo import checks
    from simfbo.config.build import law_factory

    factory, broken = law_factory(name), 0
    laws = checks.LAWS + (checks.SINGLE_LOOP_LAWS if single_loop else ())
    with contextlib.suppress(Exception):  # a factory that fails does so below, with its law
        laws += checks.MEMORY_LAWS if checks.remembers(factory) else ()
    for law in laws:
        try:
            finding = checks.examine(factory, law)
        except Exception as error:
            broken += 1
            OUT.print(f"FAILED  {law.name}: {type(error).__name__}: {error}", markup=False)
            continue
        broken += not finding.passed
        verdict = "ok    " if finding.passed else "BROKEN"
        OUT.print(f"{verdict}  {checks.describe(finding)}", markup=False)
    OUT.print(f"{len(laws) - broken} of {len(laws)} laws hold or are violated as declared.")
    return 1 if broken else 0
