"""Weights & Biases: one run per run, grouped by study."""

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simfbo.errors import require
from simfbo.runs.trackers._tracker import TrackedRun, require_installed


@dataclass(frozen=True)
class WandB:
    """A project of Weights & Biases.

    Its files are written to wandb/ in the current folder, or in WANDB_DIR: they include links out
    of this folder, which are not allowed in the run's folder.

    Attributes:
        project: its name.
        mode: online, offline or disabled; by default WANDB_MODE, otherwise online if WANDB_API_KEY
            is set and offline if not. `wandb sync` uploads offline runs.
    """

    project: str = "simfbo"
    mode: str | None = None
    name = "wandb"

    def __post_init__(self) -> None:
        """Reject a missing package before a run starts."""
        require_installed("wandb", "wandb")

    def begin(self, run: TrackedRun) -> "_Run":
        """Start a run, or resume one by its identifier."""
        package = require("wandb", "wandb")
        number = run.id or secrets.token_hex(8)
        tracked = package.init(
            project=self.project,
            mode=self.mode or _mode(),
            id=number,
            resume="allow",
            name=run.name,
            group=run.study or (run.name if "study" in run.tags else None),
            dir=os.environ.get("WANDB_DIR") or os.getcwd(),  # W&B caches the first folder
            config=dict(run.config),
            tags=[f"{key}:{value}"[:64] for key, value in run.tags.items()],
            reinit="create_new",
            settings=package.Settings(silent=True, console="off"),
        )
        return _Run(tracked, number)


def _mode() -> str:
    default = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    return os.environ.get("WANDB_MODE") or default


class _Run:
    def __init__(self, run: Any, number: str) -> None:
        self.id = number
        self._run = run

    def record(self, round: int, values: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log(dict(values), step=round)

    def artefact(self, file: Path) -> None:
        """Save a copy of a file with the run."""
        copy = shutil.copy(file, self._run.dir)
        self._run.save(copy, base_path=self._run.dir, policy="now")

    def end(self, status: str) -> None:
        """End the run; every status except finished is shown as failed."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "finished" else 1)
