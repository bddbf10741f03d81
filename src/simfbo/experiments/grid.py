"""Small computations, one per cell of a grid, kept as JSON lines and not done twice."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from simfbo.errors import UserError
from simfbo.runs.files import Json, make_folder, write_atomic
from simfbo.runs.lines import plain

Cell = Json


def compute(
    cells: Sequence[Cell],
    function: Callable[[Cell], dict[str, float]],
    file: Path,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Cell]:
    """Apply a function to every cell of a grid, and keep the results.

    Each result is written at once, so that an interrupted computation continues where it stopped.

    Args:
        cells: what sets each apart, as JSON would give it back.
        function: returns a cell's results.
        file: JSON lines, one per cell.
        on_progress: called with the cells done and the cells in all.
    """
    make_folder(file.parent)
    done = kept(cells, file)
    for i, cell in enumerate(cells):
        if i not in done:
            done[i] = cell | function(cell)
            lines = (json.dumps(plain(done[j])) + "\n" for j in sorted(done))
            write_atomic(file, "".join(lines))
            if on_progress is not None:
                on_progress(len(done), len(cells))
    return [done[i] for i in range(len(cells))]


def kept(cells: Sequence[Cell], file: Path) -> dict[int, Cell]:
    """Return the cells that a file holds, by place; raise where it holds those of other settings.

    Incomplete lines are skipped.
    """
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    done = {}
    for line in filter(None, map(_parse, text.splitlines())):
        places = [i for i, cell in enumerate(cells) if _extends(line, cell)]
        if not places:
            raise UserError(
                f"{file} holds results of other settings: choose another output folder."
            )
        done[places[0]] = line
    return done


def _extends(line: Cell, cell: Cell) -> bool:
    """Return whether a line is a cell's, with results."""
    return line.items() > cell.items()


def _parse(line: str) -> Cell | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
