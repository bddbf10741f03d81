"""Parameters and attributes that all estimators share, documented once."""

import inspect
from typing import TypeVar

Estimator = TypeVar("Estimator", bound=type)

_FRAGMENTS = {
    "training": """\
    rounds: the maximum number of iterations; each is one exchange with the clients, and automatic
        steps add about one in ten for checks.
    tol: training stops early if the relative change of the upper loss is at most `tol`, and that
        of the models at most its square root, over two evaluations (about a tenth of the rounds);
        0 to run all rounds.
    steps: "auto" chooses step sizes in about 15 further exchanges; or
        `simfbo.Point(x=..., y=..., v=...)`.""",
    "penalties": """\
    floor: the smallest L2 weight.
    spread: the expected standard deviation of the logarithms of the L2 weights. Near 0 all
        features share one weight; with infinity every weight is determined by the
        cross-validation alone, which is better if most features are irrelevant and worse
        otherwise.
    sparsity: the minimum improvement of the cross-validation by a feature; with an infinite
        spread, 0.1 removes most irrelevant features.""",
    "federation": """\
    cohort: the number of clients sampled in a round; all by default.
    local_steps: the number of local steps per round.
    batch_size: rows in a client's minibatch; all its rows by default.
    random_state: seed of all random draws: folds, trusted rows, initial weights, cohorts,
        minibatches.
    verbose: 1 prints the progress of the training.
    track: trackers of the training, such as "mlflow" or "tensorboard" (`simfbo.trackers`).""",
    "regressor": """\
    coef_: [d], in the units of X and y.
    intercept_: a number.""",
    "classifier": """\
    classes_: the classes, sorted.
    coef_: [C, d], or [1, d] for two classes, in the units of X.
    intercept_: [C], or [1] for two classes.""",
    "results": """\
    clients_: the clients' ids, in order of first appearance in the rows.
    history_: the `simfbo.History` of the training, with the upper loss.
    score_clients_: the `simfbo.ClientScores` of every client: "loss" and "accuracy" of a
        classifier, "mse" of a regressor, "deviance" of `FederatedGLM`, in the units of y. Rows are
        evaluated by a model that was not trained on them, without `sample_weight`.
    ledger_: the `simfbo.Ledger` of all traffic, including the exchange for the scales and the
        search for step sizes; the evaluation on clients is only in its `by_step`.
    n_iter_: the number of iterations.
    preprocessing_: the `FederatedTabular` that converts text and missing values to numbers; None
        if X had only numbers. The features of `coef_` are then `get_feature_names_out()`.
    n_features_in_: the number of X's columns, without those of clients, groups, periods or trust.
    feature_names_in_: their names, if X has any.""",
}


def documented(estimator: Estimator) -> Estimator:
    """Insert the shared descriptions at lines such as `{training}` of a class docstring."""
    text = inspect.cleandoc(estimator.__doc__ or "")  # Python 3.13 has removed the indentation
    for name, lines in _FRAGMENTS.items():
        text = text.replace(f"    {{{name}}}", lines)
    estimator.__doc__ = text
    return estimator
