"""The base class of all estimators: parameters, input validation, federated training, prediction.

SimFBO learns the hyperparameters of a model on the upper loss of one of the tasks (`simfbo.tasks`).
"""

from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state, check_scalar, check_X_y, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from simfbo.algorithms import auto_steps, simfbo
from simfbo.algorithms.steps.auto import FromPlan
from simfbo.core.data import pad_to_buckets
from simfbo.core.ledger import Ledger
from simfbo.core.local_work import constant
from simfbo.core.method import Method
from simfbo.core.problem import Point, PyTree
from simfbo.core.sampling import everyone, without_replacement
from simfbo.engines.simulated import SimulatedFederation
from simfbo.errors import UserError
from simfbo.estimators import _clients, _export
from simfbo.estimators._card import card_of
from simfbo.estimators._columns import has_text_or_gaps, take_named, without
from simfbo.estimators._scaling import Scaled, Table
from simfbo.estimators._tabular import FederatedTabular
from simfbo.estimators._training import (
    EVALUATIONS,
    evaluator,
    progress,
    require_finished,
    settled,
    warn_unless_converged,
)
from simfbo.estimators._validation import (
    Data,
    RandomState,
    members,
    per_row,
    warn_of_one_client,
)
from simfbo.runs.client_scores import ClientScores
from simfbo.runs.files import Json, write_atomic
from simfbo.runs.history import History
from simfbo.runs.runner import run
from simfbo.runs.trackers.tracking import Track
from simfbo.tasks.task import Outputs, Setting

if TYPE_CHECKING:
    import onnx


class FederatedEstimator(BaseEstimator):
    """A model trained through a simulated federation; see its subclasses."""

    clients_: np.ndarray
    history_: History
    ledger_: Ledger
    n_features_in_: int
    n_iter_: int
    preprocessing_: FederatedTabular | None
    score_clients_: ClientScores

    def __init__(
        self,
        *,
        rounds: int = 300,
        tol: float = 1e-3,
        steps: str | Point[float] = "auto",
        cohort: int | None = None,
        local_steps: int = 1,
        batch_size: int | None = None,
        random_state: RandomState = None,
        verbose: int = 0,
        track: Track | None = None,
    ) -> None:
        """Store the parameters; `fit` validates them."""
        self.rounds = rounds
        self.tol = tol
        self.steps = steps
        self.cohort = cohort
        self.local_steps = local_steps
        self.batch_size = batch_size
        self.random_state = random_state
        self.verbose = verbose
        self.track = track

    def _read(self, X: Data, y: Data, clients: Data, **others: Data) -> Table:
        """Validate the parameters and the arguments of `fit`, and convert the table to numbers.

        Args:
            X: the table.
            y: the target.
            clients: as in `fit`.
            others: further arguments of `fit`: a value per row, or the name of a column.
        """
        self._check_parameters()
        features, arguments, self._named = take_named(X, {"clients": clients, **others})
        (inputs, values), ledger = self._numbers(features, y, arguments["clients"])
        target, classes = self._encoded(values)
        owners = members("clients", arguments.pop("clients"), len(target))
        if clients is None:
            warn_of_one_client(4)
        if self.cohort is not None and self.cohort > len(owners.ids):
            raise UserError(
                f"A cohort of {self.cohort} cannot be sampled from {len(owners.ids)} clients: "
                "lower cohort or omit it."
            )
        return Table(inputs, target, classes, owners, arguments, ledger)

    def _numbers(self, X: Data, y: Data, clients: Data) -> tuple[Any, Ledger]:
        """Convert features and target to numbers; return them with the ledger of the exchanges."""
        rules: Any = {"dtype": np.float64, "ensure_min_samples": 2}
        rules["y_numeric"] = isinstance(self, RegressorMixin)
        if not has_text_or_gaps(X):
            self.preprocessing_ = None
            return validate_data(self, X, y, **rules), Ledger()
        clients = np.zeros(len(X)) if clients is None else clients
        tabular = FederatedTabular(scale=False).set_output(transform="default")
        self.preprocessing_ = tabular.fit(X, clients=clients)
        validate_data(self, X, skip_check_array=True)  # stores the names of the columns
        pair = check_X_y(tabular.transform(X), y, estimator=self, **rules)
        return pair, tabular.ledger_.copied()

    def _check_parameters(self) -> None:
        """Validate the parameters of all estimators."""
        for name in ("rounds", "local_steps", "cohort", "batch_size"):
            value = getattr(self, name)
            if value is not None or name in ("rounds", "local_steps"):
                check_scalar(value, name, Integral, min_val=1)
        check_scalar(self.tol, "tol", Real, min_val=0)
        if not isinstance(self.steps, Point) and self.steps != "auto":
            raise UserError(f"steps must be 'auto' or simfbo.Point(...), got {self.steps!r}.")

    def _encoded(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Convert the target to numbers; return it with the number of classes."""
        raise NotImplementedError

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _folds(self, folds: int, strata: np.ndarray) -> int:
        """Limit the number of folds to the size of the largest stratum, but at least two."""
        check_scalar(folds, "folds", Integral, min_val=2)
        return max(2, min(folds, int(np.bincount(strata).max())))

    def _train(self, setting: Setting, rows: Scaled, seed: int) -> Any:
        """Train, store the history and the ledger, and return the final state."""
        ledger = rows.ledger
        with jax.enable_x64(False):  # results do not depend on JAX's global precision
            federation = self._federation(setting, ledger)
            history = run(
                self._method(setting),
                federation,
                setting.x0,
                setting.y0,
                rounds=self.rounds,
                seed=seed,
                evaluate=evaluator(setting),
                every=max(1, self.rounds // EVALUATIONS),
                on_progress=progress(self.rounds) if self.verbose else None,
                until=partial(settled, self.tol),
                config={"estimator": type(self).__name__, **_settings(self)},
                track=self.track,
            )
            require_finished(history)
            classes = rows.training.classes
            self.score_clients_ = _clients.after_fit(setting, classes, federation, history.state)
        self.history_, self.ledger_ = history, ledger
        self.n_iter_ = history.records[-1]["round"]
        warn_unless_converged(history)
        return history.state

    def _keep_clients(self, table: Table, rows: Scaled) -> None:
        """Store the clients' ids, and their scores in the user's units."""
        self.clients_ = table.clients.ids
        unit = _clients.unit_of(table.classes, rows.target_units)
        self.score_clients_ = _clients.in_units(self.score_clients_, table, unit)

    def _federation(self, setting: Setting, ledger: Ledger) -> SimulatedFederation:
        """Create the simulated clients with this ledger."""
        sampler = everyone() if self.cohort is None else without_replacement(self.cohort)
        data = pad_to_buckets(setting.data)
        federation = SimulatedFederation(data, sampler, constant(self.local_steps))
        federation.ledger = ledger
        return federation

    def _method(self, setting: Setting) -> Method:
        """Create SimFBO with the step sizes of the estimator."""
        problem = setting.problem
        if isinstance(self.steps, Point):
            return simfbo(problem, self.steps)
        return auto_steps(FromPlan(simfbo, problem), problem, setting.x0, self.rounds)

    def get_feature_names_out(self) -> np.ndarray:
        """Return the names of the model's features after preprocessing, such as `ward_surgery`."""
        check_is_fitted(self, "history_")
        if self.preprocessing_ is not None:
            return self.preprocessing_.get_feature_names_out()
        default = [f"x{j}" for j in range(self.n_features_in_)]
        return np.asarray(getattr(self, "feature_names_in_", default), object)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.categorical = True
        return tags

    def score_clients(self, X: Data, y: Data, clients: Data = None) -> ClientScores:
        """Measure the model on the rows of each client.

        Args:
            X: [N, d], the features.
            y: [N], the target.
            clients: [N], the client that holds each row, which may be new, or the name of a column
                of X; a single client by default.

        Returns:
            "loss" (cross-entropy) and "accuracy" of a classifier, "mse" of a regressor and
            "deviance" of `FederatedGLM`, in the units of y; clients are weighted by their rows.
        """
        check_is_fitted(self, "history_")
        features, arguments, _ = take_named(X, {"clients": clients})
        inputs = self._features(without(features, self._named))
        target, classes = self._known(column_or_1d(y))
        owners = members("clients", arguments["clients"], len(inputs))
        table = Table(inputs, per_row("y", target, len(inputs)), classes, owners, {}, Ledger())
        with jax.enable_x64(True):
            return _clients.score(table, *self._predictor())

    def card(self, path: str | Path | None = None) -> str:
        """Return the model card in Markdown: data, method, scores, cost, privacy and limits.

        Args:
            path: a file to write, such as "card.md".
        """
        check_is_fitted(self, "history_")
        text = card_of(self)
        if path is not None:
            write_atomic(Path(path), text)
        return text

    def export(self) -> Any:
        """Convert the fitted model to a plain scikit-learn object, which does not need simfbo.

        Returns:
            A `LogisticRegression`, `Ridge`, `PoissonRegressor` or `GammaRegressor` with these
            coefficients, or a `VotingClassifier` of networks. If X had text or missing values, a
            `Pipeline` of a `ColumnTransformer` and that model, which accepts the same tables.
            Columns with clients, groups, trust or weights are not features: a pipeline ignores
            them; drop them for a model without a pipeline.
        """
        check_is_fitted(self, "history_")
        if self.preprocessing_ is not None:
            return _export.pipeline(self.preprocessing_, self._plain(self._weights))
        names = getattr(self, "feature_names_in_", None)
        return _export.with_names(self._plain(self._weights), names)

    def export_onnx(self, path: str | Path | None = None) -> "onnx.ModelProto":
        """Convert the fitted model to ONNX, a format with runtimes for many languages and devices.

        Needs `pip install 'simfbo[onnx]'`. If X had numbers only, the model has one input `X`,
        [N, d]. If it had text or missing values, every column is an input [N, 1] with the name of
        the column, in which "_" replaces spaces and special characters: NaN is a missing number,
        "" a missing text; True and False are 1 and 0, also as labels. Numbers have single
        precision, as usual in ONNX.

        Args:
            path: a file to write.

        Returns:
            The model. Its outputs are `label` and `probabilities`, [N, C], of a classifier, and
            `variable`, [N, 1], of a regressor.
        """
        check_is_fitted(self, "history_")
        from simfbo.estimators import _onnx  # an optional dependency

        return _onnx.exported(self.preprocessing_, self._weights, self._plain, path)

    @property
    def _weights(self) -> np.ndarray:
        """The coefficients of the features, which are the last axis."""
        raise NotImplementedError

    def _plain(self, weights: np.ndarray) -> Any:
        """Create a model of scikit-learn with these coefficients."""
        raise NotImplementedError

    def _predictor(self) -> tuple[Outputs, PyTree]:
        """Return (x, y, batch) -> the outputs for a batch, and the model y."""
        raise NotImplementedError

    def _known(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Convert the target of new rows as `_encoded` does."""
        return self._encoded(y)

    def _features(self, X: Data) -> np.ndarray:
        """Convert new rows to numbers."""
        if self.preprocessing_ is not None:
            return self.preprocessing_.transform(X)
        if has_text_or_gaps(X):
            raise UserError(
                "X has text or missing values, of which fit saw none: fill them, or fit on rows "
                "that have some."
            )
        validated: Any = validate_data(self, X, dtype=np.float64, reset=False)
        return validated


class FederatedClassifier(ClassifierMixin, FederatedEstimator):
    """A classifier; see its subclasses."""

    classes_: np.ndarray

    def _encoded(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Convert labels to indices into `classes_`; return them with the number of classes."""
        check_classification_targets(y)
        self.classes_, target = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise UserError("y holds one class only: at least two classes are needed.")
        return target.astype(np.int32), len(self.classes_)

    def score(self, X: Data, y: Data, sample_weight: Data = None) -> float:
        """Return the accuracy.

        Args:
            X: [N, d], the features.
            y: [N], the classes.
            sample_weight: [N], the weight of each row, or the name of a column of X.
        """
        features, arguments, _ = take_named(X, {"sample_weight": sample_weight})
        return super().score(features, y, arguments["sample_weight"])

    def _known(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Convert labels of new rows to indices into `classes_`."""
        if not np.isin(y, self.classes_).all():
            raise UserError("y has classes that the estimator was not fitted with: leave them out.")
        indices: Any = np.searchsorted(self.classes_, y)
        return indices.astype(np.int32), len(self.classes_)


def check_positive(estimator: object, *names: str) -> None:
    """Raise unless these parameters are positive numbers."""
    for name in names:
        value = getattr(estimator, name)
        check_scalar(value, name, Real, min_val=0, include_boundaries="neither")


def _settings(estimator: FederatedEstimator) -> Json:
    """Return the parameters of an estimator as strings and numbers."""
    plain = int | float | str | bool | None
    parameters = estimator.get_params(deep=False).items()
    return {key: value if isinstance(value, plain) else str(value) for key, value in parameters}
