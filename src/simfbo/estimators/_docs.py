"""Parameters and attributes that all estimators share, documented once."""

import inspect
from typing import TypeVar

Estimator = TypeVar("Estimator", bound=type)

_FRAGMENTS = {
    "training": """\
    rounds: the most iterations of training; each is one exchange with the clients, and automatic
        steps add about one in ten to check them.
    tol: training ends early where the upper loss has changed by no more than this, relative to
        its size, and the models by no more than its square root, over two evaluations, which
        are about a tenth of the rounds; 0 always takes all rounds.
    steps: "auto" chooses step sizes in about 15 further exchanges; or
        `simfbo.Point(x=..., y=..., v=...)`.""",
    "penalties": """\
    floor: the smallest L2 weight.
    spread: how different the L2 weights are expected to be: the standard deviation of their
        logarithms. Near 0 all features share one weight; infinity leaves every weight to the
        cross-validation alone, better where most features are irrelevant and worse elsewhere.
    sparsity: how much a feature must improve the cross-validation to be kept; with an infinite
        spread, 0.1 shuts off most irrelevant features.""",
    "federation": """\
    cohort: how many clients take part in a round; all by default.
    local_steps: how many steps a client takes in a round.
    batch_size: rows in a client's minibatch; all its rows by default.
    random_state: seed of all random draws: folds, trusted rows, initial weights, cohorts,
        minibatches.
    verbose: 1 prints the progress of the training.
    track: where the records of the training go besides `history_`, such as "mlflow" or
        "tensorboard" (`simfbo.trackers`).""",
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
        judged by a model that was not trained on them, and count once, whatever `sample_weight`.
    ledger_: the `simfbo.Ledger` of everything sent, including the exchange for the scales and
        the search for step sizes; the evaluation on clients is in its `by_step` alone.
    n_iter_: the number of iterations that were run.
    preprocessing_: the `FederatedTabular` that turned text and missing values into numbers, by
        further exchanges; None where X held only numbers. `coef_` is then about the columns that
        `get_feature_names_out()` names.
    n_features_in_: the number of X's columns, without those that name clients, groups, periods or
        trust.
    feature_names_in_: their names, if they have any.""",
}


def documented(estimator: Estimator) -> Estimator:
    """Insert the shared descriptions into a class docstring, at lines such as `{training}`."""
    text = inspect.cleandoc(estimator.__doc__ or "")  # Python 3.13 has removed the indentation
    for name, lines in _FRAGMENTS.items():
        text = text.replace(f"    {{{name}}}", lines)
    estimator.__doc__ = text
    return estimator
