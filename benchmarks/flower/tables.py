"""The tables of README.md from the results: `python benchmarks/flower/tables.py`."""

import json
from pathlib import Path

HERE = Path(__file__).parent


def rows(name):
    return json.loads((HERE / "results" / f"{name}.json").read_text())["rows"]


def table(head, lines):
    """Return a table in Markdown."""
    cells = [head, ["---"] * len(head), *lines]
    text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in cells)
    return text.replace("<", "&lt;").replace(">", "&gt;")


def equality():
    lines = [
        [r["method"], r["messages"], r["exchanges"], f"{r['largest gap']:.1e}",
         f"{r['largest number']:.2g}", "equal" if r["ledgers equal"] else "DIFFERENT"]
        for r in rows("equality")
    ]  # fmt: skip
    head = ["method", "a node sends", "exchanges", "largest gap", "largest number", "ledgers"]
    return table(head, lines)


def overhead():
    parts = ("send", "reach", "load", "compute", "back")
    lines = [
        [r["nodes"], *(f"{r[part]:.2f}" for part in parts), f"{r['median']:.1f}",
         f"{r['largest']:.1f}"]
        for r in rows("overhead")
    ]  # fmt: skip
    return table(["nodes", *parts, "median, s", "largest, s"], lines)


def wire():
    lines = [
        [r["per exchange"], f"{r['ledger'] / 1e6:.2f}", f"{r['wire'] / 1e6:.2f}",
         f"{r['wire'] / r['ledger']:.2f}", r["note"]]
        for r in rows("wire")
    ]  # fmt: skip
    return table(["per exchange", "ledger, MB", "wire, MB", "wire / ledger", ""], lines)


def faults():
    def line(r):
        hit = ", ".join(map(str, r["rounds with refusals"])) or "-"
        reasons = "; ".join(r["reasons"]) or "-"
        return [r["fault"], r["status"], r["rounds"], hit, reasons, r["seconds after"]]

    head = ["fault, in round 4", "ended", "rounds", "with refusals", "reasons", "seconds after"]
    return table(head, map(line, rows("faults")))


def refusals():
    lines = [[r["attempt"], r["exit code"], r["said"], r["seconds"]] for r in rows("refusals")]
    return table(["attempt to join", "exit code", "said", "seconds"], lines)


ALL = {f.__name__: f for f in (equality, overhead, wire, faults, refusals)}

if __name__ == "__main__":
    for name, make in ALL.items():
        print(f"{name}\n\n{make()}\n")
