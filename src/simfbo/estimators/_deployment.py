"""Estimators on Flower: the `Deployment` of an estimator, and the model of a finished run.

The problem is that of `fit`. But every client assigns its rows to folds, and the units of the rows
are measured within the run (`_standardised`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils import check_random_state, check_scalar, check_X_y

from simfbo.core.local_work import constant
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.core.sampling import without_replacement
from simfbo.errors import UserError, brief
from simfbo.estimators._base import check_positive
from simfbo.estimators._columns import is_frame
from simfbo.estimators._linear import FederatedLinear
from simfbo.estimators._scaling import Units
from simfbo.estimators._standardised import Measured, pairs, scaled, standardised
from simfbo.estimators._validation import Data
from simfbo.flower.deployment import Deployment, Settings
from simfbo.runs import checkpoint
from simfbo.runs.client_metrics import ClientMetric
from simfbo.runs.history import History
from simfbo.tasks import _regularisation as regularisation
from simfbo.tasks import linear
from simfbo.tasks.models import Linear
from simfbo.tasks.task import Setting

LoadRows = Callable[[int, Settings], tuple[Data, Data]]
Samples = tuple[np.ndarray, np.ndarray, np.ndarray]  # pairs of columns, labels, folds
Names = Any  # the number of features, or a sequence of names


class Deployable(FederatedLinear):
    """An estimator that can also be trained on Flower; see its subclasses."""

    folds: int
    floor: float
    spread: float
    sparsity: float
    regularisation_: np.ndarray

    def deployment(
        self,
        load_client: LoadRows,
        *,
        clients: int,
        features: Names,
        classes: Any = None,
        client_metrics: bool = False,
        **options: Any,
    ) -> Deployment:
        """Create a deployment that trains this model on Flower, or in `simfbo.flower.simulate`.

        Rows need not be standardised: two exchanges before the first round add up the clients'
        columns and the squared distances from their means. Each client assigns its rows to folds.
        All `rounds` are run regardless of `tol`, since the server cannot evaluate the model.

        Args:
            load_client: (client, the node's settings) -> (X, y), its rows; called on the nodes
                only.
            clients: the total number of clients, numbered from 0.
            features: the number of features, or their names, which select columns of a DataFrame.
            classes: of a classifier: all labels, or C for the labels 0 to C - 1. The server and
                every node need all of them, including those that are absent on a client.
            client_metrics: True to measure every client at each evaluation: loss and accuracy, or
                the mean squared error, of models that were not trained on the row.
            options: further fields of `simfbo.flower.Deployment`, such as `timeout`.

        Returns:
            The deployment. It is built on the server and on every node, so `random_state` must be
            a whole number; None stands for 0.
        """
        labels, width = self._labels(classes), _count("features", features)
        self._check_settings(_count("clients", clients))
        _check_options(client_metrics, options)
        seed, columns = self._common_seed(), width + (not len(labels))
        x0 = regularisation.first_x(width, self.floor)
        y0 = linear.zeros(width, len(labels), self.folds)
        problem = _problem(len(labels), self.folds, self.floor, self.spread, self.sparsity)
        data: Any = None  # only on the nodes
        method = self._method(Setting(problem, data, x0, y0))

        def load(client: int, settings: Settings) -> tuple[Samples, Samples]:
            rows = load_client(client, settings)
            samples = _samples(client, rows, features, labels, self.folds, seed)
            return samples, samples

        row = np.zeros((1, 2, columns), np.float32), np.zeros(1, np.int32), np.zeros(1, np.int32)
        return Deployment(
            algorithm=standardised(method, columns),
            x0=x0,
            y0=y0,
            clients=int(clients),
            load_client=load,
            example=(row, row),
            rounds=self.rounds,
            batch_size=self.batch_size,
            sampler=None if self.cohort is None else without_replacement(self.cohort),
            local_work=constant(self.local_steps),
            seed=seed,
            client_metrics=_metrics(len(labels)) if client_metrics else None,
            **options,
        )

    def load(
        self,
        run: str | Path | History,
        *,
        features: Sequence[str] | None = None,
        classes: Sequence[Any] | None = None,
    ) -> Self:
        """Load the model of a finished run of `deployment`.

        Sets all attributes of `fit` except `clients_` and `ledger_`, and `score_clients_` only if
        the run had `client_metrics`.

        Args:
            run: the run's folder, or the result of `simfbo.flower.simulate`.
            features: the names of the features, if they were passed to `deployment`.
            classes: the labels passed to `deployment`; 0 to C - 1 by default.
        """
        history, state = _finished(run)
        for name in ("feature_names_in_", "clients_", "ledger_", "score_clients_"):  # of an old fit
            vars(self).pop(name, None)
        width, outputs = np.shape(state.y.weight)[1:]
        if np.shape(state.units.mean)[-1] != width + (not self._classifies):
            raise UserError(f"{_named(run)} is not of a {type(self).__name__}: load its own.")
        if self._classifies:
            labels = self._labels(outputs if classes is None else classes)
            _require_count("classes", labels, outputs)
            self.classes_ = labels
        if features is not None:
            _require_count("features", features, width)
            self.feature_names_in_ = np.asarray(features, object)
        self.n_features_in_, self.preprocessing_, self._named = width, None, []
        self.history_, self.n_iter_ = history, history.records[-1]["round"]
        if history.client_scores is not None:
            self.score_clients_ = history.client_scores
        self._keep_deployed(state, width)
        return self

    def _keep_deployed(self, state: Any, width: int) -> None:
        """Store the model in the last state of a run."""
        mean, deviation = (np.asarray(array, float) for array in state.units[:2])
        units = Units(np.atleast_2d(mean).sum(0), deviation)
        target, classes = (0.0, 1.0), len(getattr(self, "classes_", ()))
        if not classes:
            target = float(units.mean[-1]), float(units.deviation[-1])
        model = regularisation.scaled(jnp.asarray(state.x), linear.averaged(Linear(*state.y)))
        self._keep_model(model, units.part(slice(width)), target, classes)
        self.regularisation_ = regularisation.penalties(np.asarray(state.x, float), self.floor)

    @property
    def _classifies(self) -> bool:
        return isinstance(self, ClassifierMixin)

    def _labels(self, classes: Any) -> np.ndarray:
        """Return the sorted labels; an empty array for a regressor."""
        if not self._classifies:
            if classes is not None:
                raise UserError(f"{type(self).__name__} has no classes: omit them.")
            return np.zeros(0)
        labels = np.unique(range(int(classes)) if isinstance(classes, Integral) else classes)
        if classes is None or len(labels) < 2:
            raise UserError("Give all labels as classes=[...], at least two, or their number.")
        return labels

    def _check_settings(self, clients: int) -> None:
        """Validate the parameters of a deployment."""
        self._check_parameters()
        check_positive(self, "floor", "spread")
        check_scalar(self.sparsity, "sparsity", Real, min_val=0)
        check_scalar(self.folds, "folds", Integral, min_val=2)
        if self.cohort is not None and self.cohort > clients:
            raise UserError(
                f"A cohort of {self.cohort} cannot be sampled from {clients} clients: lower cohort "
                "or omit it."
            )

    def _common_seed(self) -> int:
        """Return the common seed of server and nodes, which equals that of `fit`."""
        state = 0 if self.random_state is None else self.random_state
        if not isinstance(state, Integral):
            raise UserError(
                "random_state must be a whole number in a deployment: server and nodes draw alike."
            )
        return int(check_random_state(state).randint(2**31 - 1))


@lru_cache(maxsize=32)
def _problem(
    classes: int, folds: int, floor: float, spread: float, sparsity: float
) -> BilevelProblem:
    """Build the losses on batches (columns, labels, folds, total number of rows)."""
    fit = regularisation.problem(classes, folds, floor)

    def rows(batch: linear.Batch) -> linear.Batch:
        columns, labels, fold, _ = batch
        return (columns, labels, fold) if classes else (columns[:, :-1], columns[:, -1], fold)

    def upper(x: jax.Array, y: Linear, batch: linear.Batch) -> jax.Array:
        count = _bucket_size(batch[3][0])
        price, pull = sparsity * jnp.log(count) / count, 1 / (spread**2 * count)
        return fit.upper(x, y, rows(batch)) + regularisation.charge(x, price, pull)

    def lower(x: jax.Array, y: Linear, batch: linear.Batch) -> jax.Array:
        return fit.lower(x, y, rows(batch))

    return BilevelProblem(upper, lower)


def _bucket_size(count: jax.Array) -> jax.Array:
    """Compute `core.data.bucket_size` of a traced number."""
    _, bits = jnp.frexp(count)
    step = jnp.exp2(jnp.maximum(bits - 3, 0)).astype(count.dtype)
    return jnp.ceil(count / step) * step


@lru_cache(maxsize=32)
def _metrics(classes: int) -> Mapping[str, ClientMetric]:
    """Return the metrics of (x and the units, y), on rows in the users' units."""
    held_out = regularisation.held_out(regularisation.LINEAR)

    def standard(units: PyTree, batch: linear.Batch) -> linear.Batch:
        measured = Measured(*units)
        deviation = jnp.where(measured.rows > 0, measured.deviation, 1.0)
        return scaled(batch, measured._replace(deviation=deviation))[:3]

    def outputs(x: PyTree, y: Linear, batch: linear.Batch) -> jax.Array:
        return held_out(x[0], Linear(*y), standard(x[1], batch))

    def mse(x: PyTree, y: Linear, batch: linear.Batch) -> jax.Array:
        columns, _, fold = standard(x[1], batch)
        predicted = held_out(x[0], Linear(*y), (columns[:, :-1], columns[:, -1], fold))[:, 0]
        unit = jnp.where(x[1][2] > 0, x[1][1][-1], 1.0)
        return unit**2 * jnp.mean((predicted - columns[:, -1]) ** 2)

    return linear.measures(outputs, classes) if classes else {"mse": ClientMetric(mse)}


def _check_options(client_metrics: Any, options: Mapping[str, Any]) -> None:
    """Raise for options of a deployment that estimators do not support."""
    if not isinstance(client_metrics, bool):
        raise UserError(
            "client_metrics of an estimator must be True or False: it has metrics of its own."
        )
    gate = options.get("gate")
    if gate is not None and isinstance(gate.max_norm, Real):
        raise UserError(
            "A gate with a max_norm would reject the sums that scale the rows: use max_norm='auto'."
        )


def _columns(client: int, X: Data, features: Names) -> Data:
    """Select the features of a DataFrame if they are given by name."""
    if isinstance(features, Integral) or not is_frame(X):
        return X
    missing = [name for name in features if name not in X.columns]
    if missing:
        raise UserError(
            f"Client {client} has no column {brief(missing[0])}: load_client must return all "
            "features."
        )
    return X[list(features)]


def _samples(
    client: int,
    rows: tuple[Data, Data],
    features: Names,
    labels: np.ndarray,
    folds: int,
    seed: int,
) -> Samples:
    """Validate a client's rows and convert them to samples.

    Args:
        client: its number.
        rows: (X, y).
        features: their number or names.
        labels: the classes; empty for a regressor.
        folds: of the cross-validation.
        seed: of the folds.
    """
    dtype: Any = np.float64
    width, (table, target) = _count("features", features), rows
    try:
        columns, y = check_X_y(
            _columns(client, table, features), target, dtype=dtype, y_numeric=not len(labels)
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"Client {client}'s rows cannot be used: {error}") from None
    if columns.shape[1] != width:
        raise UserError(
            f"Client {client} has {columns.shape[1]} features instead of {width}: load_client must "
            "return the same columns everywhere."
        )
    if len(labels):
        indices = _indices(client, y, labels)
    else:
        columns, indices = np.column_stack([columns, y]), np.zeros(len(y), np.int32)
    return pairs(columns), indices, linear.own_folds(indices, folds, seed, client)


def _indices(client: int, y: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Convert labels to indices of classes."""
    valid = np.isin(y, labels)
    if not valid.all():
        raise UserError(
            f"Client {client} has the label {brief(y[~valid][0])}, which is not among the classes "
            f"{brief(labels.tolist())}: correct it, or add it to classes on the server and all "
            "nodes."
        )
    return np.searchsorted(labels, y).astype(np.int32)


def _finished(run: str | Path | History) -> tuple[History, Any]:
    """Return the history of a finished run, and its last x, y and units."""
    if isinstance(run, History):
        history, state = run, None
        if run.state is not None and hasattr(run.method_state, "units"):
            state = SimpleNamespace(x=run.state.x, y=run.state.y, units=run.method_state.units)
    else:
        history, state = History.load(run), _stored(Path(run))
    status = (history.end or {"status": "unfinished"})["status"]
    if status != "finished":
        raise UserError(f"{_named(run)} is {status}: resume it, and load it when it has finished.")
    if state is None:
        raise UserError(
            f"{_named(run)} holds no model of an estimator's deployment: pass the folder of one, "
            "or the result of simfbo.flower.simulate."
        )
    return history, state


def _stored(folder: Path) -> Any:
    """Read x, y and units from a run's newest checkpoint; None if it does not have them."""
    arrays = checkpoint.newest(folder, lambda stored: stored.arrays) or {}
    base = ".base.base" if ".base.base.x" in arrays else ".base"

    def fields(path: str, kind: Any) -> PyTree:
        return kind(*(arrays[f"{path}.{name}"] for name in kind._fields))

    try:
        units, y = fields(".units", Measured), fields(f"{base}.y", Linear)
        return SimpleNamespace(x=arrays[f"{base}.x"], y=y, units=units)
    except KeyError:
        return None


def _named(run: str | Path | History) -> str:
    return "The run" if isinstance(run, History) else f"The run in {run}"


def _count(name: str, value: Any) -> int:
    """Return a number, or the length of a list of names."""
    if isinstance(value, str):
        raise UserError(f"{name} must be a number or a list of names, got {brief(value)}.")
    count = value if isinstance(value, Integral | float) else len(value)
    return int(check_scalar(count, name, Integral, min_val=1))


def _require_count(name: str, values: Sequence[Any] | np.ndarray, count: int) -> None:
    if len(values) != count:
        raise UserError(f"The run has {count} {name}, got {len(values)}: give those of the run.")
