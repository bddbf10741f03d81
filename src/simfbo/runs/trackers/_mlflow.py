"""MLflow: a run per run, nested below the run of their study."""

import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from simfbo.errors import UserError, require
from simfbo.runs.trackers._tracker import TrackedRun, require_installed

_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}
_LONGEST = 500  # characters of a parameter that every store takes
_BATCH = 100  # parameters in one call


@dataclass(frozen=True)
class MLflow:
    """A store of MLflow: a database, a folder or a server.

    Attributes:
        uri: of the store; by default MLFLOW_TRACKING_URI or mlflow.db in the current folder, which
            is where `mlflow ui` looks. User names and passwords belong in the environment
            (MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD).
        experiment: in which runs are collected.
    """

    uri: str | None = None
    experiment: str = "simfbo"
    name = "mlflow"

    def __post_init__(self) -> None:
        """Refuse a missing package, and credentials, which would be stored in the run's folder."""
        require_installed("mlflow", "mlflow")
        found = urlsplit(self.uri or "")
        if found.username or found.password:
            raise UserError(
                "Put MLflow's user name and password into MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, not into the address."
            )

    def begin(self, run: TrackedRun) -> "_Run":
        """Create a run, or go on with an earlier one."""
        _prepare()
        package = require("mlflow", "mlflow")
        number, _, store = (run.id or "").partition(" ")
        store = store or _absolute(
            self.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        )
        client = package.MlflowClient(tracking_uri=store)
        if number:
            client.update_run(number, status="RUNNING")
            earlier = client.get_metric_history(number, "seconds")
            last = max((one.step for one in earlier), default=-1)
            return _Run(package, client, number, store, last)
        return _Run(package, client, self._created(package, client, run), store)

    def _created(self, package: Any, client: Any, run: TrackedRun) -> str:
        """Create a run with its settings and tags; return its number."""
        experiment = client.get_experiment_by_name(self.experiment)
        place = (
            experiment.experiment_id if experiment else client.create_experiment(self.experiment)
        )
        parent = {"mlflow.parentRunId": run.parent.partition(" ")[0]} if run.parent else {}
        tags = {**run.tags, **parent}
        number = client.create_run(place, tags=tags, run_name=run.name).info.run_id
        entities = package.entities
        params = [entities.Param(_key(k), str(v)[:_LONGEST]) for k, v in run.config.items()]
        for first in range(0, len(params), _BATCH):
            client.log_batch(number, params=params[first : first + _BATCH])
        return number


def _prepare() -> None:
    """Make MLflow talk less, and give up on a server that does not answer within half a minute."""
    usual = {
        "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    }
    for name, value in usual.items():
        os.environ.setdefault(name, value)
    for talkative in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(talkative).setLevel(logging.WARNING)


def _absolute(store: str) -> str:
    """Return a store by a name that is the same in another folder."""
    file = store.removeprefix("sqlite:///")
    return store if file == store else f"sqlite:///{Path(file).resolve()}"


class _Run:
    """A run of MLflow."""

    def __init__(self, package: Any, client: Any, number: str, store: str, last: int = -1) -> None:
        # Where a file is the store, resuming must find it; an address may hold credentials.
        self.id = f"{number} {store}" if store.startswith("sqlite:") else number
        self._number, self._last = number, last
        self._metric, self._client = package.entities.Metric, client

    def record(self, round: int, values: Mapping[str, float]) -> None:
        """Log metrics in one call, unless they were logged before the run was resumed."""
        if round <= self._last:
            return
        now = int(1000 * time.time())
        found = [self._metric(_key(name), value, now, round) for name, value in values.items()]
        self._client.log_batch(self._number, metrics=found)

    def artefact(self, file: Path) -> None:
        """Copy a file into the store."""
        self._client.log_artifact(self._number, str(file))

    def end(self, status: str) -> None:
        """End the run."""
        self._client.set_tag(self._number, "status", status)
        self._client.set_terminated(self._number, _STATUS.get(status, "FAILED"))


def _key(name: str) -> str:
    """Return a name with the characters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]
