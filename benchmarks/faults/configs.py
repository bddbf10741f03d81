"""Feed the command line 10,000 configurations with something wrong in them.

    python benchmarks/faults/configs.py         (about 1 minute)

Each is accepted, or refused with one short sentence that names the field, the flag or the file. An
accepted one is written as TOML and read again, which must give an equal configuration, and small
quadratics are built. Anything else that comes out (another exception, a warning, a traceback that
Python prints and ignores, two seconds of computing) is listed, and the exit code is 1.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from mutations import Case, cases  # noqa: E402

from simfbo.cli import arguments, compare  # noqa: E402
from simfbo.cli.main import build_parser  # noqa: E402
from simfbo.config.files import as_toml  # noqa: E402
from simfbo.config.run import RunConfig, load  # noqa: E402
from simfbo.config.tasks import QuadraticSettings  # noqa: E402
from simfbo.errors import UserError  # noqa: E402

LONGEST, SECONDS = 300, 2.0
LARGEST = 1_000_000  # numbers of a quadratic that is built here


class Finding(NamedTuple):
    """How a case ended: accepted, refused, or what is wrong; and the sentence or the error."""

    outcome: str
    text: str = ""

    @property
    def failed(self) -> bool:
        """Whether this should not have happened."""
        return self.outcome not in ("accepted", "refused")


class Hang(BaseException):
    """Raised in the midst of what takes too long."""


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise `Hang` in the block once it has computed so long, or waited thirty times as long.

    Processor time, because on a busy machine the clock goes on while nothing is done.
    """

    def stop(*given: Any) -> None:
        raise Hang

    clocks = ((signal.SIGPROF, signal.ITIMER_PROF, 1), (signal.SIGALRM, signal.ITIMER_REAL, 30))
    before = [signal.signal(alarm, stop) for alarm, _, _ in clocks]
    for _, timer, factor in clocks:
        signal.setitimer(timer, factor * seconds)
    try:
        yield
    finally:
        for (alarm, timer, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(alarm, handler)


@contextlib.contextmanager
def loud() -> Iterator[None]:
    """Raise after the block what Python would only have printed: warnings, ignored exceptions."""
    ignored: list[Any] = []
    before, sys.unraisablehook = sys.unraisablehook, ignored.append
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        sys.unraisablehook = before
        if ignored:
            raise RuntimeError(f"a traceback was printed: {ignored[0].exc_type.__name__}")


def examine(case: Case, folder: Path, build: bool = False) -> Finding:
    """Return how a case ends; `build` also builds what is accepted, where that is cheap."""
    file = folder / "case.toml"
    file.write_bytes(case.file)
    try:
        with limit(SECONDS), loud():
            configs = configurations(case, file)
    except UserError as error:
        return judged(str(error), file)
    except Hang:
        return Finding("hang")
    except BaseException as error:
        return Finding(f"exception {type(error).__name__}", str(error)[:500])
    findings = [survived(config, folder / "again.toml", build) for config in configs.values()]
    return next((finding for finding in findings if finding.failed), findings[-1])


@lru_cache
def parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    return build_parser(command)


def configurations(case: Case, file: Path) -> Mapping[str, RunConfig]:
    """Return what the command line makes of a file and flags, as `run` or `compare` would."""
    options = parser(case.command).parse_args([case.command, f"--config={file}", *case.flags])
    if case.command == "run":
        return {"": arguments.configuration(options)}
    return compare.plan(options)[0]


def judged(sentence: str, file: Path) -> Finding:
    """Return whether a sentence is one a reader can act on."""
    known = ("'", "In method '", "--", "Unknown ", "Write '", str(file))
    if not sentence.isprintable():
        return Finding("more than a line", sentence)
    if len(sentence.replace(str(file), file.name)) > LONGEST:
        return Finding("long", sentence)
    if not sentence.startswith(known) or sentence[-1] not in ".?":
        return Finding("names nothing", sentence)
    bad = ("Traceback", "function-", "constrained-", "tagged-union", "validator", "pydantic")
    return Finding("internals" if any(word in sentence for word in bad) else "refused", sentence)


def survived(config: RunConfig, file: Path, build: bool) -> Finding:
    """Return whether an accepted configuration can be written, read and built."""
    try:
        with limit(SECONDS):
            file.write_text(as_toml(config), encoding="utf-8")
            if load(file, {}) != config:
                return Finding("round trip differs", as_toml(config))
        return built(config) if build and small(config) else Finding("accepted")
    except (Exception, Hang) as error:
        return Finding(f"round trip {type(error).__name__}", str(error)[:500])


def small(config: RunConfig) -> bool:
    """Return whether a configuration is a quadratic that is built in no time."""
    task = config.task
    if not isinstance(task, QuadraticSettings):
        return False
    return task.clients * task.samples * (task.dim_x + task.dim_y) ** 2 <= LARGEST


def built(config: RunConfig) -> Finding:
    """Return whether building a configuration ends well, or in a sentence."""
    from simfbo.config.build import build_federation, build_method
    from simfbo.config.build_task import build_task

    try:
        with limit(10 * SECONDS), loud():
            task = build_task(config)
            build_federation(config, task.data)
            build_method(config, task)
    except UserError as error:
        one_line = str(error).isprintable() and len(str(error)) <= LONGEST
        return Finding("accepted" if one_line else "long when built", str(error))
    except (Exception, Hang) as error:
        return Finding(f"built {type(error).__name__}", str(error)[:500])
    return Finding("accepted", "built")


def examine_all(count: int, seed: int) -> list[tuple[Case, Finding]]:
    """Return what came of every case."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            (case, examine(case, Path(folder), build=True))
            for i, case in enumerate(cases(count, seed))
        ]


def table(found: Sequence[tuple[Case, Finding]]) -> dict[str, dict[str, int]]:
    """Return how many cases of each kind were accepted, were refused and failed."""
    counts = Counter(
        (case.kind, "failed" if finding.failed else finding.outcome) for case, finding in found
    )
    kinds = dict.fromkeys(case.kind for case, _ in found)
    outcomes = ("accepted", "refused", "failed")
    return {kind: {name: counts[kind, name] for name in outcomes} for kind in sorted(kinds)}


def main(words: Sequence[str] | None = None) -> int:
    """Print a table and what failed; write results/configs.json."""
    add = (flags := argparse.ArgumentParser(description=__doc__)).add_argument
    add("--count", type=int, default=10_000)
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=HERE / "results" / "configs.json")
    options = flags.parse_args(words)
    begin = time.perf_counter()
    found = examine_all(options.count, options.seed)
    rows, failed = table(found), [pair for pair in found if pair[1].failed]
    show(rows, failed)
    results = {
        "seed": options.seed, "cases": len(found), "failures": len(failed),
        "built": sum(finding.outcome == "accepted" and bool(finding.text) for _, finding in found),
        "seconds": round(time.perf_counter() - begin, 1), "by_kind": rows,
        "failed": dict(Counter(finding.outcome for _, finding in failed)),
    }  # fmt: skip
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


def show(rows: Mapping[str, Mapping[str, int]], failed: Sequence[tuple[Case, Finding]]) -> None:
    """Print the failures, each with its input, and the table."""
    for case, finding in failed:
        print(f"FAILED {finding.outcome} ({case.kind}, from {case.source}): {finding.text[:400]!a}")
        print(f"       simfbo {case.command} {case.flags!a:.300} {case.file!a:.600}")
    print("| mutation | accepted | refused | failed |\n|---|---|---|---|")
    total = {name: sum(row[name] for row in rows.values()) for name in ("accepted", "refused",
             "failed")}  # fmt: skip
    for kind, row in {**rows, "in all": total}.items():
        print(f"| {kind} | {row['accepted']:,} | {row['refused']:,} | {row['failed']:,} |")


if __name__ == "__main__":
    sys.exit(main())
