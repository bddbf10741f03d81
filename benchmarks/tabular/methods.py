"""What is compared: each method is trained on rows and returns predictions for others.

Classes are predicted by a probability for each, in sorted order; numbers by a number.
"""

import math
import warnings

import numpy as np
from data import Rows, part
from scipy.special import softmax
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LassoCV, LogisticRegression, LogisticRegressionCV, RidgeCV
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from simfbo import Point, SimulatedFederation, run
from simfbo.algorithms import auto_steps, fedavg
from simfbo.core.data import pad_to_buckets
from simfbo.core.partition import by_user
from simfbo.estimators import (
    FederatedLogistic,
    FederatedMLPClassifier,
    FederatedRidge,
    FederatedTabular,
)
from simfbo.tasks import _regularisation, linear
from simfbo.tasks.samples import Training

FOLDS = 5
PENALTIES = np.geomspace(1e-3, 1, 8)
FLOOR = 5e-4
ROUNDS = 300  # for each penalty
START, LONG = 0.003, 1000  # where the estimators start, and the most rounds they take
SMOOTHING = 1.0  # rows of the mean over all classes that a client's own model is mixed with


def is_number(rows: Rows) -> bool:
    """Return whether the target is a number."""
    return rows.target.dtype.kind == "f"


def ours(train: Rows, test: Rows, seed: int) -> np.ndarray:
    """Fit the estimator with its defaults, on the table as it is."""
    kind = FederatedRidge if is_number(train) else FederatedLogistic
    model = kind(random_state=seed).fit(train.frame, train.target, train.clients)
    return model.predict(test.frame) if is_number(train) else model.predict_proba(test.frame)


def pooled(train: Rows, test: Rows, seed: int) -> np.ndarray:
    """Cross-validate one penalty on all rows in one place."""
    if is_number(train):
        model = RidgeCV(np.geomspace(1e-4, 1e4, 25))
    else:
        model = LogisticRegressionCV(
            Cs=10, cv=FOLDS, scoring="neg_log_loss", max_iter=5000, use_legacy_attributes=False,
            l1_ratios=(0,),
        )  # fmt: skip
    return _fitted(model, train, test)


def lasso(train: Rows, test: Rows, seed: int) -> np.ndarray:
    """Cross-validate one L1 penalty on all rows in one place; exactly, to the solvers' tolerance.

    liblinear solves two classes (it penalises the intercept too), saga more.
    """
    if is_number(train):
        return _fitted(LassoCV(cv=FOLDS, max_iter=100_000, random_state=seed), train, test)
    two = len(np.unique(train.target)) == 2
    model = LogisticRegressionCV(
        Cs=10, cv=FOLDS, scoring="neg_log_loss", max_iter=5000, use_legacy_attributes=False,
        l1_ratios=(1,), solver="liblinear" if two else "saga",
        random_state=seed,
    )  # fmt: skip
    return _fitted(model, train, test)


def alone(train: Rows, test: Rows, seed: int) -> np.ndarray:
    """Fit a model on each client's own rows."""
    classes = np.unique(train.target)
    shape = len(test.target) if is_number(train) else (len(test.target), len(classes))
    found = np.zeros(shape)
    for client in np.unique(test.clients):
        own, asked = (part(rows, rows.clients == client) for rows in (train, test))
        found[test.clients == client] = _alone(own, asked, classes)
    return found


def _alone(own: Rows, asked: Rows, classes: np.ndarray) -> np.ndarray:
    """Return the predictions of a client's own model, for all classes."""
    if is_number(own):
        if len(own.target) < 2:
            return np.full(len(asked.target), own.target.mean())
        return _fitted(RidgeCV(np.geomspace(1e-4, 1e4, 25)), own, asked)
    present, counts = np.unique(own.target, return_counts=True)
    found = np.zeros((len(asked.target), len(classes)))
    places = np.searchsorted(classes, present)
    if len(present) < 2:
        found[:, places] = 1.0
    elif counts.min() < FOLDS:
        found[:, places] = _fitted(LogisticRegression(max_iter=5000), own, asked)
    else:
        found[:, places] = pooled(own, asked, 0)
    rows = len(own.target)
    return (rows * found + SMOOTHING / len(classes)) / (rows + SMOOTHING)


def _fitted(model, train: Rows, test: Rows) -> np.ndarray:
    """Return the predictions of a scikit-learn model."""
    numbers = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    text = make_pipeline(OneHotEncoder(handle_unknown="ignore", sparse_output=False),
                         StandardScaler())  # fmt: skip
    columns = make_column_transformer(
        (numbers, make_column_selector(dtype_include="number")),
        (text, make_column_selector(dtype_exclude="number")),
    )
    both = make_pipeline(columns, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both.fit(train.frame, train.target)
        return both.predict(test.frame) if is_number(train) else both.predict_proba(test.frame)


def start(train: Rows, test: Rows, seed: int) -> np.ndarray:
    """FedAvg with the L2 weight that the estimators start from, which is nowhere tuned."""
    return _fedavg(train, test, seed, [START], LONG)


def shared(train: Rows, test: Rows, seed: int) -> np.ndarray:
    """FedAvg with one penalty for all features, the best of eight by the same cross-validation."""
    return _fedavg(train, test, seed, PENALTIES, ROUNDS)


def _fedavg(train: Rows, test: Rows, seed: int, choices, rounds: int) -> np.ndarray:
    """Train the folds' models with each of some penalties, and predict with the best."""
    tabular = FederatedTabular().fit(train.frame, clients=train.clients)
    features, unseen = (np.asarray(tabular.transform(rows.frame), "f4") for rows in (train, test))
    classes = 0 if is_number(train) else len(np.unique(train.target))
    middle, unit, target = 0.0, 1.0, np.unique(train.target, return_inverse=True)[1]
    if not classes:
        middle, unit = train.target.mean(), train.target.std()
        target = ((train.target - middle) / unit).astype("f4")
    owner = np.unique(train.clients, return_inverse=True)[1]
    training = Training(features, target if not classes else target.astype("i4"), classes,
                        by_user(owner))  # fmt: skip
    setting = _regularisation.assemble(
        training, folds=FOLDS, floor=FLOOR, sparsity=0.0, batch_size=None, seed=seed
    )
    score = linear.upper_loss(setting.problem, setting.data)
    method = auto_steps(
        lambda plan: fedavg(setting.problem, plan.local.y, plan.server.y),
        setting.problem, setting.x0, rounds,
    )  # fmt: skip
    states = [_averaged(method, setting, penalty, rounds) for penalty in choices]
    best = min(states, key=score)
    model = _regularisation.scaled(best.x, linear.averaged(best.y))
    outputs = unseen @ np.asarray(model.weight) + np.asarray(model.bias)
    return softmax(outputs, axis=1) if classes else outputs[:, 0] * unit + middle


def _averaged(method, setting, penalty: float, rounds: int) -> Point:
    """Return x for a penalty, and the y that FedAvg finds with it."""
    x = np.full_like(setting.x0, math.log(penalty / FLOOR - 1))
    federation = SimulatedFederation(pad_to_buckets(setting.data))
    history = run(method, federation, x, setting.y0, rounds=rounds)
    return Point(x=x, y=history.state.y)


def our_network(train: Rows, test: Rows, seed: int) -> np.ndarray:
    """Fit the network with its defaults, on the table as it is; for classes."""
    model = FederatedMLPClassifier(random_state=seed)
    return model.fit(train.frame, train.target, train.clients).predict_proba(test.frame)


def pooled_network(train: Rows, test: Rows, seed: int) -> np.ndarray:
    """Cross-validate one penalty of scikit-learn's network of the same size; for classes."""
    model = MLPClassifier((16,), activation="tanh", max_iter=1000, random_state=seed)
    grid = {"alpha": np.geomspace(1e-3, 1, 4)}
    return _fitted(GridSearchCV(model, grid, scoring="neg_log_loss", cv=FOLDS), train, test)


METHODS = {
    "ours": ours, "0.003 for all": start, "FedAvg, shared penalty": shared, "pooled": pooled,
    "lasso, pooled": lasso, "alone": alone,
}  # fmt: skip
NETWORKS = {"our network": our_network, "pooled network": pooled_network}
