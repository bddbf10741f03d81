"""A damaged history, repaired for a run that goes on from a checkpoint."""

from typing import NamedTuple

from simfbo.runs.files import Json
from simfbo.runs.lines import as_line, read_lines


class Repaired(NamedTuple):
    """The part of a history that belongs to a checkpoint.

    Attributes:
        data: the content of its file.
        lost: what is missing, in words; None if the file was not damaged.
    """

    data: bytes
    lost: str | None = None


def repair(data: bytes, manifest: Json) -> Repaired:
    """Return the history that belongs to a checkpoint, as far as its lines are whole.

    Lines of later rounds are left out, since they are written again. The header, which a checkpoint
    holds too, says what was lost.

    Args:
        data: the damaged file.
        manifest: the checkpoint's.
    """
    header, found = manifest["header"], read_lines(data)
    kept = [
        (raw, line)
        for raw, line in zip(found.raw, found.whole, strict=True)
        if line["kind"] not in ("header", "end") and _belongs(line, manifest)
    ]
    have = {line["round"] for _, line in kept if line["kind"] == "record"}
    records = [t for t in range(manifest["round"] + 1) if _is_due(t, header) and t not in have]
    refusals = manifest["refused"] - sum(line["kind"] == "refusal" for _, line in kept)
    lost = {"records": records, "refusals": max(0, refusals)}
    header = {**header, "repaired": {"round": manifest["round"], "lost": lost}}
    lines = [as_line("header", header), *(raw for raw, _ in kept)]
    return Repaired(b"".join(lines), _in_words(records, max(0, refusals)))


def _belongs(line: Json, manifest: Json) -> bool:
    """Return whether a line was written before a checkpoint.

    An evaluation of another round than those that are due is the last one of an interrupted run,
    which is dropped when the run goes on.
    """
    t = line.get("round")
    due = line["kind"] not in ("record", "clients") or _is_due(t, manifest["header"])
    return type(t) is int and t <= manifest["round"] and due


def _is_due(t: object, header: Json) -> bool:
    return type(t) is int and (t % header["every"] == 0 or t == header["rounds"])


def _in_words(records: list[int], refusals: int) -> str:
    """Return what was lost, as part of a sentence.

    Example:
        >>> _in_words([4], 2), _in_words([], 0)
        ('the record of iteration 4 and 2 excluded replies are lost', 'nothing is lost')
    """
    shown = ", ".join(map(str, records[:5])) + (", ..." if len(records) > 5 else "")
    some = "s" * (len(records) > 1)
    what = [f"the record{some} of iteration{some} {shown}"] if records else []
    what += [f"{refusals} excluded repl{'y' if refusals == 1 else 'ies'}"] if refusals else []
    verb = "is" if len(records) + refusals == 1 else "are"
    return f"{' and '.join(what)} {verb} lost" if what else "nothing is lost"
