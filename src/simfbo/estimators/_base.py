"""What all estimators share: parameters, input validation, federated training, prediction.

SimFBO learns the hyperparameters of a model's training on the upper loss of one of the tasks
(`simfbo.tasks`).
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
        """Validate the parameters and the arguments of `fit`, and turn the table into numbers.

        Args:
            X: the table.
            y: the target.
            clients: as in `fit`.
            others: further arguments of `fit` that hold a value per row or name a column.
        """
        self._check_parameters()
        features, given, self._named = take_named(X, {"clients": clients, **others})
        (inputs, values), ledger = self._numbers(features, y, given["clients"])
        target, classes = self._encoded(values)
        found = members("clients", given.pop("clients"), len(target))
        if clients is None:
            warn_of_one_client(4)
        if self.cohort is not None and self.cohort > len(found.ids):
            raise UserError(
                f"A cohort of {self.cohort} cannot be sampled from {len(found.ids)} clients: "
                "lower cohort or omit it."
            )
        return Table(inputs, target, classes, found, given, ledger)

    def _numbers(self, X: Data, y: Data, clients: Data) -> tuple[Any, Ledger]:
        """Return features and target as numbers, and what was exchanged for that."""
        rules: Any = {"dtype": np.float64, "ensure_min_samples": 2}
        rules["y_numeric"] = isinstance(self, RegressorMixin)
        if not has_text_or_gaps(X):
            self.preprocessing_ = None
            return validate_data(self, X, y, **rules), Ledger()
        one = np.zeros(len(X)) if clients is None else clients
        tabular = FederatedTabular(scale=False).set_output(transform="default")
        self.preprocessing_ = tabular.fit(X, clients=one)
        validate_data(self, X, skip_check_array=True)  # notes the columns
        both = check_X_y(tabular.transform(X), y, estimator=self, **rules)
        return both, tabular.ledger_.copied()

    def _check_parameters(self) -> None:
        """Validate the parameters that all estimators have."""
        for name in ("rounds", "local_steps", *_given(self, "cohort", "batch_size")):
            check_scalar(getattr(self, name), name, Integral, min_val=1)
        check_scalar(self.tol, "tol", Real, min_val=0)
        if not isinstance(self.steps, Point) and self.steps != "auto":
            raise UserError(f"steps must be 'auto' or simfbo.Point(...), got {self.steps!r}.")

    def _encoded(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the target as numbers, and the number of classes."""
        raise NotImplementedError

    def _seed(self) -> int:
        """Return the seed of one fit."""
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _folds(self, folds: int, strata: np.ndarray) -> int:
        """Return the number of folds: at most the size of the largest stratum, at least two."""
        check_scalar(folds, "folds", Integral, min_val=2)
        return max(2, min(folds, int(np.bincount(strata).max())))

    def _train(self, setting: Setting, rows: Scaled, seed: int) -> Any:
        """Train, keep the history and the ledger, and return the final state."""
        ledger = rows.ledger
        # The same result whatever the global precision of JAX.
        with jax.enable_x64(False):
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
            kind = rows.training.classes
            self.score_clients_ = _clients.after_fit(setting, kind, federation, history.state)
        self.history_, self.ledger_ = history, ledger
        self.n_iter_ = history.records[-1]["round"]
        warn_unless_converged(history)
        return history.state

    def _keep_clients(self, table: Table, rows: Scaled) -> None:
        """Store who the clients are, and their scores in the user's units."""
        self.clients_ = table.clients.ids
        unit = _clients.unit_of(table.classes, rows.target_units)
        self.score_clients_ = _clients.in_units(self.score_clients_, table, unit)

    def _federation(self, setting: Setting, ledger: Ledger) -> SimulatedFederation:
        """Return the simulated clients; what they send is added to the ledger."""
        sampler = everyone() if self.cohort is None else without_replacement(self.cohort)
        data = pad_to_buckets(setting.data)
        federation = SimulatedFederation(data, sampler, constant(self.local_steps))
        federation.ledger = ledger
        return federation

    def _method(self, setting: Setting) -> Method:
        """Return SimFBO with the given or with automatic steps."""
        problem = setting.problem
        if isinstance(self.steps, Point):
            return simfbo(problem, self.steps)
        return auto_steps(FromPlan(simfbo, problem), problem, setting.x0, self.rounds)

    def get_feature_names_out(self) -> np.ndarray:
        """Return the names of the features that the model sees, such as `ward_surgery`."""
        check_is_fitted(self, "history_")
        if self.preprocessing_ is not None:
            return self.preprocessing_.get_feature_names_out()
        plain = [f"x{j}" for j in range(self.n_features_in_)]
        return np.asarray(getattr(self, "feature_names_in_", plain), object)

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
        features, given, _ = take_named(X, {"clients": clients})
        inputs = self._features(without(features, self._named))
        target, classes = self._known(column_or_1d(y))
        found = members("clients", given["clients"], len(inputs))
        table = Table(inputs, per_row("y", target, len(inputs)), classes, found, {}, Ledger())
        with jax.enable_x64(True):
            return _clients.score(table, *self._predictor())

    def card(self, path: str | Path | None = None) -> str:
        """Return the model card in Markdown: data, method, scores, cost, privacy and limits.

        Args:
            path: where to write it as well, such as "card.md".
        """
        check_is_fitted(self, "history_")
        text = card_of(self)
        if path is not None:
            write_atomic(Path(path), text)
        return text

    def export(self) -> Any:
        """Return the fitted model as a plain scikit-learn object, which needs no simfbo.

        Returns:
            A `LogisticRegression`, `Ridge`, `PoissonRegressor` or `GammaRegressor` with these
            coefficients, or a `VotingClassifier` of networks. Where X held text or gaps, a
            `Pipeline` of a `ColumnTransformer` and that model, which takes the same tables. Columns
            that named clients, groups, trust or weights are no features: a pipeline ignores them,
            drop them for a model alone.
        """
        check_is_fitted(self, "history_")
        if self.preprocessing_ is not None:
            return _export.pipeline(self.preprocessing_, self._plain(self._weights))
        names = getattr(self, "feature_names_in_", None)
        return _export.with_names(self._plain(self._weights), names)

    def export_onnx(self, path: str | Path | None = None) -> "onnx.ModelProto":
        """Return the fitted model in the format ONNX, which many languages and devices can run.

        Needs `pip install 'simfbo[onnx]'`. Where X held numbers only, the model has one input `X`,
        [N, d]. Where it held text or gaps, every column is an input [N, 1] of its own name, with
        "_" for spaces and the like: NaN is a missing number, "" a missing text; True and False are
        1 and 0, also as labels. Numbers are single precision, as is usual in ONNX.

        Args:
            path: where to write the model as well.

        Returns:
            The model. Its outputs are `label` and `probabilities`, [N, C], of a classifier, and
            `variable`, [N, 1], of a regressor.
        """
        check_is_fitted(self, "history_")
        from simfbo.estimators import _onnx  # which is not always needed

        return _onnx.exported(self.preprocessing_, self._weights, self._plain, path)

    @property
    def _weights(self) -> np.ndarray:
        """Return what multiplies the features; the last axis counts them."""
        raise NotImplementedError

    def _plain(self, weights: np.ndarray) -> Any:
        """Return a model of scikit-learn with these weights of the features."""
        raise NotImplementedError

    def _predictor(self) -> tuple[Outputs, PyTree]:
        """Return (x, y, batch) -> the outputs for a batch, and y, which holds the model."""
        raise NotImplementedError

    def _known(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the target of new rows as `_encoded` does."""
        return self._encoded(y)

    def _features(self, X: Data) -> np.ndarray:
        """Return new rows as numbers."""
        if self.preprocessing_ is not None:
            return self.preprocessing_.transform(X)
        if has_text_or_gaps(X):
            raise UserError(
                "X has text or missing values, of which fit saw none: fill them, or fit on rows "
                "that have some."
            )
        found: Any = validate_data(self, X, dtype=np.float64, reset=False)
        return found


class FederatedClassifier(ClassifierMixin, FederatedEstimator):
    """A classifier; see its subclasses."""

    classes_: np.ndarray

    def _encoded(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the labels as indices into `classes_`, and the number of classes."""
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
            sample_weight: [N], how much each row counts, or the name of a column of X.
        """
        features, given, _ = take_named(X, {"sample_weight": sample_weight})
        return super().score(features, y, given["sample_weight"])

    def _known(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the labels of new rows as indices into `classes_`, and the number of classes."""
        if not np.isin(y, self.classes_).all():
            raise UserError("y has classes that the estimator was not fitted with: leave them out.")
        places: Any = np.searchsorted(self.classes_, y)
        return places.astype(np.int32), len(self.classes_)


def check_positive(estimator: object, *names: str) -> None:
    """Raise unless these parameters are positive numbers."""
    for name in names:
        value = getattr(estimator, name)
        check_scalar(value, name, Real, min_val=0, include_boundaries="neither")


def _given(estimator: object, *names: str) -> list[str]:
    """Return the names of the parameters that are not None."""
    return [name for name in names if getattr(estimator, name) is not None]


def _settings(estimator: FederatedEstimator) -> Json:
    """Return the parameters of an estimator as texts and numbers, for trackers."""
    plain = int | float | str | bool | None
    parameters = estimator.get_params(deep=False).items()
    return {key: value if isinstance(value, plain) else str(value) for key, value in parameters}
