"""Repair of a damaged history, for a run that is resumed from a checkpoint."""

from typing import NamedTuple

from simfbo.runs.files import Json
from simfbo.runs.lines import as_line, read_lines


class Repaired(NamedTuple):
    """The part of a history that belongs to a checkpoint.

    Attributes:
        data: the content of its file.
        lost: a description of the lost lines; None if the file was not damaged.
    """

    data: bytes
    lost: str | None = None


def repair(data: bytes, manifest: Json) -> Repaired:
    """Rebuild the history up to a checkpoint from its valid lines.

    Lines of later rounds are dropped, since they will be written again. The header is taken from
    the checkpoint, and lists the losses.

    Args:
        data: the damaged file.
        manifest: of the checkpoint.
    """
    header, lines = manifest["header"], read_lines(data)
    kept = [
        (raw, line)
        for raw, line in zip(lines.raw, lines.whole, strict=True)
        if line["kind"] not in ("header", "end") and _belongs(line, manifest)
    ]
    recorded = {line["round"] for _, line in kept if line["kind"] == "record"}
    records = [t for t in range(manifest["round"] + 1) if _is_due(t, header) and t not in recorded]
    refusals = max(0, manifest["refused"] - sum(line["kind"] == "refusal" for _, line in kept))
    lost = {"records": records, "refusals": refusals}
    header = {**header, "repaired": {"round": manifest["round"], "lost": lost}}
    content = [as_line("header", header), *(raw for raw, _ in kept)]
    return Repaired(b"".join(content), _in_words(records, refusals))


def _belongs(line: Json, manifest: Json) -> bool:
    """Check if a line was written before a checkpoint.

    An evaluation in a round without a scheduled one is the last one of an interrupted run, which
    is dropped when the run is resumed.
    """
    t = line.get("round")
    due = line["kind"] not in ("record", "clients") or _is_due(t, manifest["header"])
    return type(t) is int and t <= manifest["round"] and due


def _is_due(t: object, header: Json) -> bool:
    return type(t) is int and (t % header["every"] == 0 or t == header["rounds"])


def _in_words(records: list[int], refusals: int) -> str:
    """Describe the losses in a clause.

    Example:
        >>> _in_words([4], 2), _in_words([], 0)
        ('the record of iteration 4 and 2 excluded replies are lost', 'nothing is lost')
    """
    shown = ", ".join(map(str, records[:5])) + (", ..." if len(records) > 5 else "")
    plural = "s" * (len(records) > 1)
    losses = [f"the record{plural} of iteration{plural} {shown}"] if records else []
    losses += [f"{refusals} excluded repl{'y' if refusals == 1 else 'ies'}"] if refusals else []
    verb = "is" if len(records) + refusals == 1 else "are"
    return f"{' and '.join(losses)} {verb} lost" if losses else "nothing is lost"
