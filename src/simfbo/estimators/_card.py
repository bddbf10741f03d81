"""The model card of an estimator: what its history says, and what only the estimator knows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sklearn

from simfbo.core.ledger import Traffic
from simfbo.errors import plain
from simfbo.estimators._tabular import FederatedTabular
from simfbo.runs.card import Model, card, table
from simfbo.runs.history import History

if TYPE_CHECKING:
    from simfbo.estimators._base import FederatedEstimator

_COLUMNS, _CATEGORIES = 50, 8  # that are listed
_HIDDEN = ("estimator", "verbose", "track")  # settings that change nothing
_LIMITS = (
    "Clients' scores are measured on rows of the clients that took part in training, each by a "
    "model that was not trained on it. But these rows also chose the hyperparameters, so the "
    "scores are no test on unseen data: use `score_clients` on rows that were kept back.",
    "Clients that did not take part may differ from those that did: measure the model on theirs "
    "before you use it there.",
)


def card_of(estimator: "FederatedEstimator") -> str:
    """Return the model card of an estimator that was fitted, or loaded from a run."""
    history, name = estimator.history_, type(estimator).__name__
    fitted = history.header["config"].get("estimator") == name  # else an earlier fit's are not its
    model = Model(
        title=name,
        text=_text(estimator, name),
        scores=estimator.score_clients_ if fitted else history.client_scores,
        clients=estimator.clients_.tolist() if fitted else None,
        sections=[("Preprocessing", _preprocessing(estimator.preprocessing_))],
        limits=_LIMITS,
    )
    sent = estimator.ledger_.evaluation if fitted else Traffic()
    return card(_described(history, sent), model)


def _described(history: History, sent: Traffic) -> History:
    """Return the history with what belongs on a card, and what the clients' scores took."""
    header = history.header
    config = {key: value for key, value in header["config"].items() if key not in _HIDDEN}
    versions = {**header["versions"], "scikit-learn": sklearn.__version__}
    own = {**header, "config": config, "versions": versions}
    last = {name: value for name, value in history.records[-1].items() if name != "y_move"}
    if total := sent.bytes_down + sent.bytes_up:
        last["bytes_evaluation"] = total
    return replace(history, header=own, records=[last], state=None)


def _text(estimator: "FederatedEstimator", name: str) -> str:
    """Return what the model is, and what it predicts."""
    about = (type(estimator).__doc__ or name).strip().partition("\n")[0]
    features = estimator.n_features_in_
    count = f"{features:,} feature{'s' * (features != 1)}"
    classes: Sequence[Any] | None = getattr(estimator, "classes_", None)
    if classes is None:
        return f"{about} It predicts a number from {count}."
    return f"{about} It predicts one of {len(classes):,} classes ({_some(classes)}) from {count}."


def _preprocessing(tabular: FederatedTabular | None) -> str:
    """Return what the clients agreed on for each column."""
    if tabular is None:
        return "None but standardisation, which the coefficients include: all features are numbers."
    fill = dict(zip(tabular.numeric_, tabular.fill_, strict=True))
    rows = [[name, *_agreed(tabular, name, fill)] for name in tabular.inputs[:_COLUMNS]]
    text = (
        f"Gaps in numbers are filled with the {tabular.impute} over all clients. Text becomes a "
        "column for each category; an unknown category gives zeros. The server has learnt every "
        "client's categories.\n\n"
    )
    more = len(tabular.inputs) - len(rows)
    end = f"\n\n{more:,} more columns are not listed." if more else ""
    return text + table(["column", "kind", "agreed"], rows) + end


def _agreed(tabular: FederatedTabular, name: str, fill: dict[str, float]) -> tuple[str, str]:
    """Return what a column holds, and its categories or what fills its gaps."""
    if name in fill:
        return "number", f"{tabular.impute} {fill[name]:.4g}"
    kept = ["(missing)" if text is None else text for text in tabular.categories_[name]]
    rare = len(tabular.infrequent_[name])
    shared = f"; {rare:,} infrequent ones share a column" if rare else ""
    listed = f": {_some(kept)}" if len(kept) <= _CATEGORIES else ""  # more may be names of people
    return "text", f"{len(kept):,} categories{listed}{shared}"


def _some(values: Sequence[Any]) -> str:
    """Return the first values in words.

    Example:
        >>> _some(range(10))
        '0, 1, 2, 3, 4, 5, 6, 7, ...'
    """
    shown = [plain(str(value), 40) for value in values[:_CATEGORIES]]
    return ", ".join([*shown, *(["..."] if len(values) > _CATEGORIES else [])])
