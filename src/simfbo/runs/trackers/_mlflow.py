"""MLflow: one run per run, nested in the run of its study."""

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
_LONGEST = 500  # characters of a parameter that every store accepts
_BATCH = 100  # parameters in one call


@dataclass(frozen=True)
class MLflow:
    """A store of MLflow: a database, a folder or a server.

    Attributes:
        uri: of the store; by default MLFLOW_TRACKING_URI or mlflow.db in the current folder, the
            default of `mlflow ui`. User names and passwords belong in the environment
            (MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD).
        experiment: of the runs.
    """

    uri: str | None = None
    experiment: str = "simfbo"
    name = "mlflow"

    def __post_init__(self) -> None:
        """Reject a missing package, and credentials, which would be stored in the run's folder."""
        require_installed("mlflow", "mlflow")
        address = urlsplit(self.uri or "")
        if address.username or address.password:
            raise UserError(
                "Put MLflow's user name and password into MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, not into the address."
            )

    def begin(self, run: TrackedRun) -> "_Run":
        """Create a run, or continue a resumed one."""
        _prepare()
        package = require("mlflow", "mlflow")
        number, _, store = (run.id or "").partition(" ")
        store = store or _absolute(
            self.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        )
        client = package.MlflowClient(tracking_uri=store)
        if number:
            client.update_run(number, status="RUNNING")
            logged = client.get_metric_history(number, "seconds")
            last = max((metric.step for metric in logged), default=-1)
            return _Run(package, client, number, store, last)
        return _Run(package, client, self._create(package, client, run), store)

    def _create(self, package: Any, client: Any, run: TrackedRun) -> str:
        """Create a run with its settings and tags; return its identifier."""
        experiment = client.get_experiment_by_name(self.experiment)
        experiment_id = (
            experiment.experiment_id if experiment else client.create_experiment(self.experiment)
        )
        parent = {"mlflow.parentRunId": run.parent.partition(" ")[0]} if run.parent else {}
        tags = {**run.tags, **parent}
        number = client.create_run(experiment_id, tags=tags, run_name=run.name).info.run_id
        entities = package.entities
        params = [entities.Param(_key(k), str(v)[:_LONGEST]) for k, v in run.config.items()]
        for first in range(0, len(params), _BATCH):
            client.log_batch(number, params=params[first : first + _BATCH])
        return number


def _prepare() -> None:
    """Reduce MLflow's logging, and its timeout for servers to half a minute."""
    defaults = {
        "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    for logger in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(logger).setLevel(logging.WARNING)


def _absolute(store: str) -> str:
    """Make the path of an SQLite database absolute."""
    file = store.removeprefix("sqlite:///")
    return store if file == store else f"sqlite:///{Path(file).resolve()}"


class _Run:
    def __init__(self, package: Any, client: Any, number: str, store: str, last: int = -1) -> None:
        # A resumed run needs the path of a database; the address of a server may have credentials.
        self.id = f"{number} {store}" if store.startswith("sqlite:") else number
        self._number, self._last = number, last
        self._metric, self._client = package.entities.Metric, client

    def record(self, round: int, values: Mapping[str, float]) -> None:
        """Log metrics in one call, unless they were logged before the run was resumed."""
        if round <= self._last:
            return
        now = int(1000 * time.time())
        metrics = [self._metric(_key(name), value, now, round) for name, value in values.items()]
        self._client.log_batch(self._number, metrics=metrics)

    def artefact(self, file: Path) -> None:
        """Copy a file into the store."""
        self._client.log_artifact(self._number, str(file))

    def end(self, status: str) -> None:
        """End the run."""
        self._client.set_tag(self._number, "status", status)
        self._client.set_terminated(self._number, _STATUS.get(status, "FAILED"))


def _key(name: str) -> str:
    """Replace characters that MLflow rejects in names."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]
