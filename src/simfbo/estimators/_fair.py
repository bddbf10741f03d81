"""Linear models that reduce the loss of the worst group (`simfbo.tasks._fair`)."""

from typing import Self

import numpy as np

from simfbo.core.problem import Point
from simfbo.estimators._base import check_positive
from simfbo.estimators._docs import documented
from simfbo.estimators._linear import FederatedLinear, LinearClassifier, LinearRegressor
from simfbo.estimators._scaling import one_hot, standardised
from simfbo.estimators._validation import Data, RandomState, members
from simfbo.runs.trackers.tracking import Track
from simfbo.tasks import linear
from simfbo.tasks._fair import assemble, group_weights, held_out
from simfbo.tasks.metrics import group_means
from simfbo.tasks.models import Linear


class Fair(FederatedLinear):
    """A linear model with weights for groups; see its subclasses."""

    groups_: np.ndarray
    group_weights_: np.ndarray
    group_loss_: np.ndarray

    def __init__(
        self,
        *,
        rounds: int = 300,
        tol: float = 1e-3,
        steps: str | Point[float] = "auto",
        folds: int = 5,
        penalty: float = 0.003,
        sharpness: float = 20.0,
        cohort: int | None = None,
        local_steps: int = 1,
        batch_size: int | None = None,
        random_state: RandomState = None,
        verbose: int = 0,
        track: Track | None = None,
    ) -> None:
        """Store the parameters; `fit` validates them."""
        super().__init__(
            rounds=rounds,
            tol=tol,
            steps=steps,
            cohort=cohort,
            local_steps=local_steps,
            batch_size=batch_size,
            random_state=random_state,
            verbose=verbose,
            track=track,
        )
        self.folds = folds
        self.penalty = penalty
        self.sharpness = sharpness

    def fit(
        self,
        X: Data,
        y: Data,
        clients: Data = None,
        groups: Data = None,
    ) -> Self:
        """Train on the clients' rows.

        Args:
            X: [N, d], the features: an array, or a DataFrame, which may hold text and gaps.
            y: [N], the target.
            clients: [N], the client that holds each row, or the name of a column of X, which is
                then no feature; a single client by default, with a warning.
            groups: [N], the group of each row, or the name of a column; by default the clients
                are the groups.
        """
        check_positive(self, "penalty", "sharpness")
        table, seed = self._read(X, y, clients, groups=groups), self._seed()
        group = table.clients
        if groups is not None:
            group = members("groups", table.given["groups"], len(table.target))
        rows = standardised(table, one_hot(group.owner, len(group.ids)))
        strata = group.owner if not table.classes else group.owner * table.classes + table.target
        setting = assemble(
            rows.training,
            group.owner,
            rows.shares,
            strata,
            folds=self._folds(self.folds, strata),
            penalty=self.penalty,
            sharpness=self.sharpness,
            batch_size=self.batch_size,
            seed=seed,
        )
        state = self._train(setting, rows, seed)
        self._keep(table, rows, linear.averaged(state.y.models))
        self.groups_, self.group_weights_ = group.ids, group_weights(state.x, rows.shares)
        losses = _group_losses(state.y.models, setting.data.lower.samples, table.classes)
        # Half squared errors of the standardised target become squared errors in the units of y.
        self.group_loss_ = losses if table.classes else losses * (2 * rows.target_units[1] ** 2)
        return self


@documented
class FairClassifier(LinearClassifier, Fair):
    """Logistic regression that reduces the loss of the worst group.

    Every group has a training weight, learnt to minimise the largest loss of a group in a
    cross-validation; predictions use the mean of the folds' models. Features are standardised in
    two exchanges with the clients.

    Args:
        {training}
        folds: of the cross-validation; fewer if no class of a group has as many rows.
        penalty: the L2 weight, relative to the mean cross-entropy of standardised rows.
        sharpness: of the smooth maximum over the groups' losses.
        {federation}

    Attributes:
        {classifier}
        groups_: the groups, in order of first appearance in the rows.
        group_weights_: the training weight of a row of each group; the mean over the rows is one.
        group_loss_: the mean cross-entropy of each group; every row is evaluated by a model that
            was not trained on it.
        {results}
    """


@documented
class FairRegressor(LinearRegressor, Fair):
    """Ridge regression that reduces the error of the worst group.

    Like `FairClassifier`, but for numbers; the target is standardised too.

    Args:
        {training}
        folds: of the cross-validation; fewer if no group has as many rows.
        penalty: the L2 weight, relative to the mean of half squared errors of standardised rows.
        sharpness: of the smooth maximum over the groups' losses.
        {federation}

    Attributes:
        {regressor}
        groups_: the groups, in order of first appearance in the rows.
        group_weights_: the training weight of a row of each group; the mean over the rows is one.
        group_loss_: the mean squared error of each group in the units of y; every row is evaluated
            by a model that was not trained on it.
        {results}
    """


def _group_losses(models: Linear, rows: linear.Batch, classes: int) -> np.ndarray:
    """Compute each group's mean loss by models that were not trained on the row."""
    count = int(rows[2].max()) + 1
    return np.asarray(group_means(held_out(models, rows, classes), rows[2], count), float)
