"""Small computations, one per cell of a grid, cached as JSON lines."""

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
    """Apply a function to every cell of a grid, and save the results.

    Each result is written immediately, so an interrupted computation can be resumed.

    Args:
        cells: their settings, with JSON values.
        function: returns a cell's results.
        file: JSON lines, one per cell.
        on_progress: called with the completed and the total number of cells.
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
    """Read the cells in a file, by position; raise if it holds cells of other settings.

    Incomplete lines are skipped.
    """
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    done = {}
    for line in filter(None, map(_parse, text.splitlines())):
        matches = [i for i, cell in enumerate(cells) if line.items() > cell.items()]
        if not matches:
            raise UserError(
                f"{file} holds results of other settings: choose another output folder."
            )
        done[matches[0]] = line
    return done


def _parse(line: str) -> Cell | None:
    try:
        cell = json.loads(line)
    except ValueError:
        return None
    return cell if isinstance(cell, dict) else None
