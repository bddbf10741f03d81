"""What all estimators share: parameters, checked input, training through a federation, prediction.

An estimator is a linear model whose training holds quantities that are learnt as well, by SimFBO on
the upper loss of one of the tasks (`simfbo.tasks`).
"""

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple

import jax
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state, check_scalar
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from simfbo.algorithms._simfbo import Steps
from simfbo.core.data import FederatedData
from simfbo.core.federation import Ledger
from simfbo.core.partition import Rows, by_user
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.errors import UserError
from simfbo.estimators import _scaling as scaling
from simfbo.estimators._reuse import Recipe, workshop
from simfbo.estimators._validation import InputError, Members, members
from simfbo.runs.history import History
from simfbo.runs.runner import run
from simfbo.tasks.models import Linear

_LOOKS = 20  # evaluations in a run


class Table(NamedTuple):
    """What `fit` was given, checked.

    Attributes:
        inputs: [N, d] in the user's units.
        target: [N], places in `classes_`, or numbers in the user's units.
        classes: how many; 0 where the target is a number.
        clients: who holds which row.
    """

    inputs: np.ndarray
    target: np.ndarray
    classes: int
    clients: Members

    @property
    def parts(self) -> Rows:
        """Return each client's rows."""
        return by_user(self.clients.owner)


class Scaled(NamedTuple):
    """What is trained on.

    Attributes:
        features: [N, d], of mean 0 and deviation 1.
        target: [N], classes or numbers of mean 0 and deviation 1.
        units: of the features.
        target_units: of the target; 0 and 1 for classes.
        shares: the means of the further columns.
        ledger: with the exchange that found the units.
    """

    features: np.ndarray
    target: np.ndarray
    units: scaling.Units
    target_units: tuple[float, float]
    shares: np.ndarray
    ledger: Ledger


class FederatedLinear(BaseEstimator):
    """A linear model trained through a simulated federation; see its subclasses."""

    clients_: np.ndarray
    coef_: Any
    intercept_: Any
    history_: History
    ledger_: Ledger
    n_iter_: int

    def __init__(
        self,
        *,
        rounds: int = 300,
        steps: str | Steps = "auto",
        cohort: int | None = None,
        local_steps: int = 1,
        batch_size: int | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        """Keep the parameters; `fit` looks at them."""
        self.rounds = rounds
        self.steps = steps
        self.cohort = cohort
        self.local_steps = local_steps
        self.batch_size = batch_size
        self.random_state = random_state
        self.verbose = verbose

    def _read(self, X: Any, y: Any, clients: Any) -> Table:
        """Return what is to be fitted, after all checks."""
        for name in ("rounds", "local_steps", *_given(self, "cohort", "batch_size")):
            check_scalar(getattr(self, name), name, Integral, min_val=1)
        if not isinstance(self.steps, Steps) and self.steps != "auto":
            raise InputError(f"steps must be 'auto' or simfbo.Steps(...), got {self.steps!r}.")
        options = {"dtype": np.float64, "ensure_min_samples": 2}
        X, y = validate_data(self, X, y, **options, y_numeric=isinstance(self, RegressorMixin))
        target, classes = self._encoded(y)
        found = members("clients", clients, len(target))
        if self.cohort is not None and self.cohort > len(found.ids):
            raise InputError(
                f"A cohort of {self.cohort} cannot be drawn from {len(found.ids)} clients: "
                "lower cohort, or leave it out."
            )
        return Table(X, target, classes, found)

    def _encoded(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the target as numbers, and how many classes it has."""
        raise NotImplementedError

    def _seed(self) -> int:
        """Return the seed of one fit."""
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _folds(self, folds: Any, strata: np.ndarray) -> int:
        """Return how many folds the rows allow: the largest stratum has one for each, or two."""
        check_scalar(folds, "folds", Integral, min_val=2)
        return max(2, min(folds, int(np.bincount(strata).max())))

    def _train(
        self,
        losses: tuple[Callable[..., BilevelProblem], tuple],
        data: FederatedData,
        start: tuple[PyTree, PyTree],
        ledger: Ledger,
        seed: int,
    ) -> Any:
        """Return the last state, and keep the history and the ledger."""
        steps = self.steps if isinstance(self.steps, Steps) else None
        recipe = Recipe(*losses, self.rounds, steps, self.cohort, self.local_steps)
        # The same result whatever JAX is set to elsewhere.
        with jax.enable_x64(False), workshop(recipe, data, start, ledger) as shop:
            history = run(
                shop.method,
                shop.federation,
                *start,
                rounds=self.rounds,
                seed=seed,
                evaluate=lambda state: {"upper_loss": shop.upper(data, state)},
                every=max(1, self.rounds // _LOOKS),
                on_round=_telling(self.rounds) if self.verbose else None,
            )
        _require_an_end(history)
        self.history_, self.ledger_ = history, ledger
        self.n_iter_ = history.records[-1]["round"]
        return history.state

    def _keep(self, table: Table, rows: Scaled, model: Linear) -> None:
        """Keep a model of scaled rows, in the user's units."""
        middle, spread = rows.target_units
        weight = np.asarray(model.weight, float) / rows.units.deviation[:, None] * spread
        bias = np.asarray(model.bias, float) * spread + middle - rows.units.mean @ weight
        if table.classes == 2:
            weight, bias = weight[:, 1:] - weight[:, :1], bias[1:] - bias[:1]
        self.clients_ = table.clients.ids
        self.coef_, self.intercept_ = weight.T, bias
        if not table.classes:
            self.coef_, self.intercept_ = weight[:, 0], float(bias[0])

    def _scores(self, X: Any) -> np.ndarray:
        """Return the linear function of new rows."""
        check_is_fitted(self, "coef_")
        inputs = validate_data(self, X, dtype=np.float64, reset=False)
        return inputs @ self.coef_.T + self.intercept_


class FederatedClassifier(ClassifierMixin, FederatedLinear):
    """A linear classifier; see its subclasses."""

    classes_: np.ndarray

    def _encoded(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the labels' places in `classes_`, and how many there are."""
        check_classification_targets(y)
        self.classes_, target = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError("y holds one class only: give rows of at least two classes.")
        return target.astype(np.int32), len(self.classes_)

    def decision_function(self, X: Any) -> np.ndarray:
        """Return each row's score for every class; of two classes, for the second alone."""
        scores = self._scores(X)
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of every class, in the order of `classes_`."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        odds = np.exp(scores - scores.max(1, keepdims=True))
        return odds / odds.sum(1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """Return the likeliest class of every row."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)]


class FederatedRegressor(RegressorMixin, FederatedLinear):
    """A linear regressor; see its subclasses."""

    def _encoded(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the target, which has no classes."""
        return y.astype(np.float64), 0

    def predict(self, X: Any) -> np.ndarray:
        """Return the expected target of every row."""
        return self._scores(X)


def standardised(table: Table, *further: np.ndarray) -> Scaled:
    """Return rows on one scale, found by one exchange over the clients.

    Args:
        table: what is to be fitted.
        further: columns whose means are wanted as well.
    """
    own = () if table.classes else (table.target[:, None],)
    units, ledger = scaling.measure(np.hstack([table.inputs, *own, *further]), table.parts)
    width = table.inputs.shape[1]
    of_features, target, scale = units.part(slice(width)), table.target, (0.0, 1.0)
    if own:
        scale = float(units.mean[width]), float(units.deviation[width])
        target = ((target - scale[0]) / scale[1]).astype(np.float32)
    shares = units.mean[width + len(own) :]
    return Scaled(of_features(table.inputs), target, of_features, scale, shares, ledger)


def check_positive(estimator: Any, *names: str) -> None:
    """Raise unless these parameters are positive numbers."""
    for name in names:
        value = getattr(estimator, name)
        check_scalar(value, name, Real, min_val=0, include_boundaries="neither")


def _given(estimator: Any, *names: str) -> list[str]:
    """Return the names of the parameters that are not None."""
    return [name for name in names if getattr(estimator, name) is not None]


def _telling(rounds: int) -> Callable[[int, dict[str, Any] | None], None]:
    """Return what prints a line for every evaluation."""

    def tell(t: int, record: dict[str, Any] | None) -> None:
        if record is not None:
            print(f"round {t} of {rounds}: upper loss {record['upper_loss']:.6g}")

    return tell


def _require_an_end(history: History) -> None:
    """Raise unless a run went through all its rounds."""
    end = history.end or {"status": "interrupted"}
    if end["status"] == "interrupted":
        raise KeyboardInterrupt  # which the runner took for itself
    if end["status"] != "finished":
        raise UserError(
            f"The training {end['status']} in round {end['round']}: {end['reason']}; "
            "steps='auto' finds steps of its own."
        )
