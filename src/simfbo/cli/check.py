"""`simfbo check`: check the laws that an algorithm must obey."""

import argparse
import contextlib
from typing import TYPE_CHECKING

from simfbo.cli.arguments import add_json
from simfbo.cli.console import OUT, print_json, progress_bar
from simfbo.runs.files import Json

if TYPE_CHECKING:
    from simfbo.checks import Factory, Law


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `check`."""
    add = parser.add_argument
    add(
        "factory",
        metavar="NAME",
        help="a built-in method, such as fednest, or package.module:factory, "
        "called with (problem, local, server) or (problem, steps)",
    )
    add(
        "--single-loop",
        action="store_true",
        help="also the laws of SimFBO's family (SOBA, eta, sampling, drift)",
    )
    add_json(parser)


def call(options: argparse.Namespace) -> int:
    """Run the command with parsed arguments."""
    return check(options.factory, options.single_loop, options.json)


def check(name: str, single_loop: bool, as_json: bool) -> int:
    """Check the laws on a method; return 1 if one is broken."""
    from simfbo import checks
    from simfbo.config.build import law_factory

    factory, findings = law_factory(name), []
    laws = checks.LAWS + (checks.SINGLE_LOOP_LAWS if single_loop else ())
    with contextlib.suppress(Exception):  # a failure is reported below, with its law
        laws += checks.MEMORY_LAWS if checks.remembers(factory) else ()
    with progress_bar(quiet=not OUT.is_terminal) as progress:
        for law in progress.track(laws, description="laws"):
            findings.append(_examined(factory, law))
            verdict = findings[-1]["verdict"]
            shown = verdict if verdict == "ok" else verdict.upper()
            OUT.print(f"{shown:6}  {findings[-1]['text']}", markup=False)
    broken = sum(finding["verdict"] != "ok" for finding in findings)
    OUT.print(f"{len(laws) - broken} of {len(laws)} laws hold or are violated as declared.")
    if as_json:
        print_json({"algorithm": name, "passed": not broken, "laws": findings})
    return 1 if broken else 0


def _examined(factory: "Factory", law: "Law") -> Json:
    """Check one law; return the finding for programs."""
    from simfbo import checks

    try:
        finding = checks.examine(factory, law)
    except Exception as error:
        text = f"{law.name}: {type(error).__name__}: {error}"
        return {"law": law.name, "verdict": "failed", "text": text}
    return {
        "law": law.name,
        "verdict": "ok" if finding.passed else "broken",
        "measured": finding.measured,
        "limit": law.limit,
        "declared_violation": finding.violation,
        "text": checks.describe(finding),
    }
