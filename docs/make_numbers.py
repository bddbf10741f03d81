"""Write the numbers that documents quote, and the dates of results: `make numbers`.

A quoted number stands before a comment that names it, as in 0.911<!--cleaning-->. NUMBERS says in
which cell of a benchmark's tables it is; those tables are made from the results by the benchmarks'
own scripts. `python docs/make_numbers.py --check` lists what differs in place of writing it.

Dates are those of the commits that brought the oldest results as they are: a file's content is as
old as the first commit that holds it, wherever it was at that time, a line of results.jsonl as
itself.
"""

import datetime
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from simfbo.runs.history import History
from simfbo.studies import tables as tables_of_runs

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
DATED = ("docs/explanation-reproduction.md", "docs/reference-benchmarks.md")
PAGES = ("README.md", "docs/how-to-choose-by-symptom.md", "docs/how-to-deploy.md",
         "docs/explanation-communication.md", "docs/explanation-limits.md",
         "docs/explanation-alternatives.md", "docs/how-to-tune-clean-repair.md",
         "docs/reference-configuration.md", "docs/reference-mimefbo.md", *DATED)  # fmt: skip
_QUOTED = re.compile(r"(?P<old>[-+]?\d[\d,.]*(?:e-?\d+)?(?:\s±\s[\d.]+)?)<!--(?P<name>[\w.-]+)-->")
_DATE = r"20\d\d-\d\d-\d\d"
_ACCURACY = "test accuracy, %"


class Cell(NamedTuple):
    """Where a number is: a cell of a table, and the text to quote of it.

    Attributes:
        folder: of the benchmark, or one of its pages.
        row: the row's first cell, or first cells.
        column: the column's head.
        quote: of the cell's text.
        nth: which of the tables that have this row and column.
    """

    folder: str
    row: str
    column: str
    quote: Callable[[str], str] = str
    nth: int = 0

    def text(self) -> str:
        """Find the cell, and what is quoted of it."""
        rows = (row for table in tables(self.folder) for row in table if self.column in row)
        found = [row[self.column] for row in rows if self.row in _names(row)]
        return self.quote(found[self.nth])


class Cost(NamedTuple):
    """The mean megabytes until an accuracy is first reached, from the histories of some runs.

    Attributes:
        folder: of the benchmark.
        run: the beginning of the histories' names, without the seed.
        accuracy: on test images.
        spec: the number's format.
    """

    folder: str
    run: str
    accuracy: float
    spec: str = ".1f"

    def text(self) -> str:
        """Read the runs."""
        files = sorted((BENCHMARKS / self.folder / "results").glob(f"{self.run}-seed*.jsonl"))
        firsts = tables_of_runs.firsts(
            list(map(History.load, files)), "test_accuracy", self.accuracy
        )
        return format(statistics.mean(map(tables_of_runs.megabytes, firsts)), self.spec)


def mean(text: str) -> str:
    """Cut off the deviation."""
    return text.split(" ± ")[0]


def rounded(spec: str, unit: float = 1) -> Callable[[str], str]:
    """Format the mean in another unit."""
    return lambda text: format(float(mean(text).replace(",", "")) / unit, spec)


def tenths(text: str) -> str:
    """Round mean and deviation to one decimal."""
    return " ± ".join(f"{float(number):.1f}" for number in text.split(" ± "))


def part(index: int) -> Callable[[str], str]:
    """Take one of the numbers between slashes."""
    return lambda text: text.split(" / ")[index]


_TO_974 = "to 97.4 %: exchanges / MB / CPU s"
_TO_97 = "to 97 %: exchanges / MB / CPU s"
_TO_95 = "to 95 %: s / CPU s"
_PAPER = "SimFBO, paper's settings"
_AUTO = "automatic steps"
_WORST = "worst group loss"
_BALANCED = "balanced accuracy"
# The tables of practice in the order of its page: five of label cleaning, two long tails, ...
NUMBERS = {
    "cleaning": Cell("practice", _AUTO, "test accuracy"),
    "cleaning-noisy": Cell("practice", "noisy labels", "test accuracy"),
    "cleaning-both": Cell("practice", "noisy and clean together", "test accuracy"),
    "cleaning-clean": Cell("practice", "clean labels only", "test accuracy"),
    "cleaning-oracle": Cell("practice", "all labels right (oracle)", "test accuracy"),
    "cleaning-few-wrong": Cell("practice", _AUTO, "test accuracy", nth=4),
    "cleaning-few-wrong-noisy": Cell("practice", "noisy labels", "test accuracy", nth=4),
    "tail": Cell("practice", _AUTO, _BALANCED),
    "tail-no-tuning": Cell("practice", "no tuning", _BALANCED),
    "tail-logit": Cell("practice", "logit adjustment", _BALANCED),
    "fair": Cell("practice", _AUTO, _WORST),
    "fair-no-weights": Cell("practice", "no weights", _WORST),
    "fair-inverse": Cell("practice", "inverse frequency", _WORST),
    "fair-powers": Cell("practice", "inverse frequency, 9 powers tried", _WORST),
    "fair-mortgages": Cell("practice", _AUTO, _WORST, nth=1),
    "fair-mortgages-no-weights": Cell("practice", "no weights", _WORST, nth=1),
    "penalties": Cell("practice", _AUTO, "test loss"),
    "penalties-shared": Cell("practice", "one lambda, 20 tried", "test loss"),
    "penalties-lasso": Cell("practice", "lasso, rows pooled", "test loss"),
    "penalties-shut": Cell("practice", _AUTO, "irrelevant shut", rounded(".0f", 1 / 32)),
    "penalties-schools": Cell("practice", _AUTO, "test loss", nth=1),
    "schools-shared": Cell("practice", "one lambda, 20 tried", "test loss", nth=1),
    "schools-none": Cell("practice", "no tuning", "test loss", nth=1),
    "penalties-oracle": Cell("practice", "the features that matter (oracle)", "test loss"),
    "few-clean": Cell("practice", _AUTO, "test accuracy", nth=2),
    "few-clean-noisy": Cell("practice", "noisy labels", "test accuracy", nth=2),
    "few-clean-clients": Cell("practice", _AUTO, "test accuracy", nth=3),
    "heads-personal": Cell("practice", _AUTO, "unseen accuracy", nth=1),
    "heads-shared": Cell("practice", _AUTO, "unseen shared accuracy", nth=1),
    "text": Cell("text", "SimFBO, trust learnt", "adapters and head, %", mean),
    "text-fedavg": Cell("text", "FedAvg, all labels as they are", "adapters and head, %", mean),
    "lfednest-gb": Cell("mnist-iid", "LFedNest, tuned", "MB", rounded(".1f", 1000)),
    "lfednest-shards": Cell("mnist-noniid", "LFedNest, tuned", _ACCURACY, rounded(".1f")),
    "digit-simfbo": Cell("heterogeneous", "SimFBO", _ACCURACY, tenths, 1),
    "digit-shrofbo": Cell("heterogeneous", "ShroFBO", _ACCURACY, tenths, 1),
    "digit-shrofbo-small": Cell("heterogeneous", "ShroFBO", _ACCURACY, tenths, 2),
    "digit-mimefbo": Cell("heterogeneous", "MimeFBO", _ACCURACY, tenths),
    "sampled-mimefbo": Cell(
        "sampled-clients", "MimeFBO, 5 local steps, clients remember", _TO_97, part(0)
    ),
    "bytes-iid": Cost("bytes", "mnist-iid-paper", 0.974, ",.0f"),
    "bytes-iid-coded": Cost("bytes", "mnist-iid-small", 0.974),
    "bytes-iid-fedavg": Cost("bytes", "mnist-iid-fedavg-small", 0.974),
    "bytes-shards": Cost("bytes", "mnist-shards-paper", 0.952, ",.0f"),
    "bytes-shards-coded": Cost("bytes", "mnist-shards-shards-95", 0.952),
    "bytes-shards-fedavg": Cost("bytes", "mnist-shards-shards-fedavg", 0.952),
    "bytes-shards-97": Cost("bytes", "mnist-shards-paper", 0.97, ",.0f"),
    "bytes-shards-97-coded": Cost("bytes", "mnist-shards-shards-97", 0.97),
    "bytes-shards-97-fedavg": Cost("bytes", "mnist-shards-shards-fedavg", 0.97),
    "bytes-fedavg": Cell("bytes", "FedAvg of the whole network, float32", _ACCURACY, mean),
    "bytes-simfbo": Cell("bytes", "1 client, 25 local steps, cosine, float32", _ACCURACY, mean),
    "paper-iid": Cell("mnist-iid", _PAPER, _ACCURACY),
    "paper-mb": Cell("mnist-iid", _PAPER, _TO_974, part(1)),
    "v0": Cell("mnist-iid", "SimFBO, v held at zero", _ACCURACY),
    "paper-shards": Cell("mnist-noniid", _PAPER, _ACCURACY),
    "rounds-simfbo": Cell("mnist-iid", _PAPER, "exchanges an iteration"),
    "rounds-fednest": Cell("mnist-iid", "FedNest, tuned", "exchanges an iteration"),
    "rounds-aggitd": Cell("mnist-iid", "FBO-AggITD, tuned", "exchanges an iteration"),
    "to-fednest-rounds": Cell("mnist-iid", "SimFBO, tuned", "times fewer exchanges"),
    "to-fednest-bytes": Cell("mnist-iid", "SimFBO, tuned", "times fewer MB"),
    "time-simfbo": Cell("running-time", "SimFBO, tuned", _TO_95, part(0)),
    "time-fednest": Cell("running-time", "FedNest, tuned", _TO_95, part(0)),
    "time-aggitd": Cell("running-time", "FBO-AggITD, tuned", _TO_95, part(0)),
    "uneven-simfbo": Cell("heterogeneous", "SimFBO", _ACCURACY, mean),
    "uneven-shrofbo": Cell("heterogeneous", "ShroFBO", _ACCURACY, mean),
    "uneven-aggitd": Cell("heterogeneous", "FBO-AggITD", _ACCURACY, mean),
    "speedup-p": Cell("speedup", "clients alike", "P", mean, 4),
    "speedup-tau": Cell("speedup", "clients alike", "τ", mean),
    "mismatch-simfbo": Cell("objective-mismatch", "SimFBO, 0.0025", "to Φ~'s point, %", mean),
    "mismatch-shrofbo": Cell("objective-mismatch", "ShroFBO, 0.0025", "to Φ's point, %", mean),
    "optimisers-simfbo": Cell("objective-mismatch", "SimFBO, 0.0025", "to Φ~'s point, %", mean, 1),
    "optimisers-shrofbo": Cell("objective-mismatch", "ShroFBO, 0.0025", "to Φ's point, %", mean, 1),
    "cifar": Cell("cifar-iid", _PAPER, _ACCURACY),
    "cifar-momentum": Cell("cifar-iid", "SimFBO, server momentum, cosine", _ACCURACY),
    "cifar-aggitd": Cell("cifar-iid", "FBO-AggITD, SimFBO's steps, λ 0.003", _ACCURACY),
    "cifar-aggitd-five": Cell("cifar-iid", "FBO-AggITD, paper's steps, times five", _ACCURACY),
    "fednest-released": Cell("mnist-iid", "FedNest, as released", _ACCURACY, mean),
    "fednest-tuned": Cell("mnist-iid", "FedNest, tuned", _ACCURACY, mean),
    "shro-small": Cell(
        "heterogeneous", "ShroFBO minus SimFBO, test accuracy, points", "mean", nth=2
    ),
    "shro-paper": Cell("heterogeneous", "ShroFBO minus SimFBO, test accuracy, points", "mean"),
    "shro-digit": Cell(
        "heterogeneous", "ShroFBO minus SimFBO, test accuracy, points", "mean", nth=1
    ),
    "local-rounds": Cell("mnist-iid", "SimFBO, 5 local steps", _TO_974, part(0)),
    "paper-rounds": Cell("mnist-iid", _PAPER, _TO_974, part(0)),
    "lfednest-small": Cell("mnist-noniid", "LFedNest, released steps, series 0.002", _ACCURACY),
    "personal": Cell("personal", "SimFBO, private lower level", "all images: mean, %"),
    "personal-alone": Cell("personal", "training alone", "all images: mean, %"),
    "personal-one": Cell("personal", "FedAvg, one network", "all images: mean, %"),
    "personal-labels": Cell("personal", "SimFBO, private lower level", "own labels: mean, %"),
    "personal-labels-one": Cell("personal", "FedAvg, one network", "own labels: mean, %"),
    "personal-tuned": Cell("personal", "FedAvg, then fine-tuned", "all images: mean, %"),
    "personal-few": Cell("personal", "SimFBO, private lower level", "15 % of them: mean, %"),
    "personal-few-one": Cell("personal", "FedAvg, one network", "15 % of them: mean, %"),
    "flower-5": Cell("flower", "simfbo, each, 5", "largest gap"),
    "flower-60": Cell("trust/door.md", "its largest distance from the simulation", "now"),
    "flower-dithered": Cell("flower", "dithered(3)", "largest gap"),
    "flower-low-rank": Cell("flower", "small (low rank)", "largest gap"),
}  # fmt: skip


@cache
def tables(folder: str) -> list[list[dict[str, str]]]:
    """Read a benchmark's tables: the cells of each row by column."""
    page = BENCHMARKS / folder
    if page.is_dir():
        page = page / ("table.md" if (page / "table.md").is_file() else "README.md")
    found = []
    for text in re.findall(r"(?:^\|.*\n?)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        lines = (line.strip("|").split("|") for line in text.strip().split("\n"))
        heads, _, *rows = ([cell.strip() for cell in line] for line in lines)
        found.append([dict(zip(heads, row, strict=True)) for row in rows])
    return found


def _names(row: dict[str, str]) -> list[str]:
    """List what a row may be called: by its first cell, its first two, or its first three."""
    return [", ".join(list(row.values())[:count]) for count in (1, 2, 3)]


@cache
def first_commits() -> dict[str, str]:
    """Find the date of the first commit that holds a file's content, by the content's name."""
    log = _git("log", "--reverse", "--raw", "--no-abbrev", "--format=%ad", "--date=short")
    found, date = {}, ""
    for line in filter(None, log.split("\n")):
        if line[0] == ":":
            found.setdefault(line.split()[3], date)
        else:
            date = line
    return found


@cache
def date(folder: str) -> str:
    """Find when the oldest results of a benchmark were made."""
    found, today = set(), datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    for line in _git("ls-files", "--stage", f"benchmarks/{folder}/results*").splitlines():
        path = line.split("\t")[1]
        if path.endswith("results.jsonl"):
            blame = _git("blame", "--date=short", path)
            found |= set(re.findall(r"^[^)]* (20\d\d-\d\d-\d\d) ", blame, re.MULTILINE))
        else:
            found.add(first_commits().get(line.split()[1], today))
    return min(found)


def _git(*words: str) -> str:
    """Run git."""
    run = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout


@cache
def text_of(name: str) -> str:
    """Read a number from its source."""
    return NUMBERS[name].text()


def quoted(text: str) -> str:
    """Put the numbers of today into a text."""
    return _QUOTED.sub(lambda m: f"{text_of(m['name'])}<!--{m['name']}-->", text)


def dated(text: str) -> str:
    """Put the dates of today into those rows of a text that link to a benchmark."""
    return "\n".join(map(_dated_row, text.split("\n")))


def _dated_row(row: str) -> str:
    link = re.search(r"\(\.\./benchmarks/([\w-]+)/README\.md\)", row)
    if link is None or "`simfbo run " in row:  # of a run nothing is kept
        return row
    return re.sub(rf"\| {_DATE} (?=\|)", lambda _: f"| {date(link[1])} ", row)


def main() -> None:
    """Write the pages, or list what differs."""
    found = []
    for name in PAGES:
        old = (ROOT / name).read_text(encoding="utf-8")
        new = dated(quoted(old)) if name in DATED else quoted(old)
        pairs = zip(old.split("\n"), new.split("\n"), strict=True)
        found += [f"{name}: {line}" for before, line in pairs if before != line]
        if "--check" not in sys.argv:
            (ROOT / name).write_text(new, encoding="utf-8")
    print("\n".join(found) or "All numbers and dates are those of the results.")
    sys.exit(1 if found and "--check" in sys.argv else 0)


if __name__ == "__main__":
    main()
