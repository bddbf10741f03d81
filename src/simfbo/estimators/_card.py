"""The model card of an estimator."""

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

_COLUMNS, _CATEGORIES = 50, 8  # limits of lists
_HIDDEN = ("estimator", "verbose", "track")  # settings without effect on results
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
    fitted = history.header["config"].get("estimator") == name  # False for a loaded model
    model = Model(
        title=name,
        text=_text(estimator, name),
        scores=estimator.score_clients_ if fitted else history.client_scores,
        clients=estimator.clients_.tolist() if fitted else None,
        sections=[("Preprocessing", _preprocessing(estimator.preprocessing_))],
        limits=_LIMITS,
    )
    evaluation = estimator.ledger_.evaluation if fitted else Traffic()
    return card(_for_card(history, evaluation), model)


def _for_card(history: History, evaluation: Traffic) -> History:
    """Reduce the history to the entries of a card, and add the traffic of the clients' scores."""
    header = history.header
    config = {key: value for key, value in header["config"].items() if key not in _HIDDEN}
    versions = {**header["versions"], "scikit-learn": sklearn.__version__}
    header = {**header, "config": config, "versions": versions}
    last = {name: value for name, value in history.records[-1].items() if name != "y_move"}
    if total := evaluation.bytes_down + evaluation.bytes_up:
        last["bytes_evaluation"] = total
    return replace(history, header=header, records=[last], state=None)


def _text(estimator: "FederatedEstimator", name: str) -> str:
    """Describe the model and its predictions."""
    summary = (type(estimator).__doc__ or name).strip().partition("\n")[0]
    features = estimator.n_features_in_
    count = f"{features:,} feature{'s' * (features != 1)}"
    classes: Sequence[Any] | None = getattr(estimator, "classes_", None)
    if classes is None:
        return f"{summary} It predicts a number from {count}."
    names = _first_values(classes)
    return f"{summary} It predicts one of {len(classes):,} classes ({names}) from {count}."


def _preprocessing(tabular: FederatedTabular | None) -> str:
    """Describe the preprocessing of each column."""
    if tabular is None:
        return "None but standardisation, which the coefficients include: all features are numbers."
    fill = dict(zip(tabular.numeric_, tabular.fill_, strict=True))
    rows = [[name, *_kind_and_details(tabular, name, fill)] for name in tabular.inputs[:_COLUMNS]]
    text = (
        f"Gaps in numbers are filled with the {tabular.impute} over all clients. Text becomes a "
        "column for each category; an unknown category gives zeros. The server has learnt every "
        "client's categories.\n\n"
    )
    more = len(tabular.inputs) - len(rows)
    rest = f"\n\n{more:,} more columns are not listed." if more else ""
    return text + table(["column", "kind", "agreed"], rows) + rest


def _kind_and_details(
    tabular: FederatedTabular, name: str, fill: dict[str, float]
) -> tuple[str, str]:
    """Return the kind of a column, and its categories or its imputed value."""
    if name in fill:
        return "number", f"{tabular.impute} {fill[name]:.4g}"
    frequent = ["(missing)" if text is None else text for text in tabular.categories_[name]]
    rare = len(tabular.infrequent_[name])
    shared = f"; {rare:,} infrequent ones share a column" if rare else ""
    # Columns with many categories may have names of persons.
    listed = f": {_first_values(frequent)}" if len(frequent) <= _CATEGORIES else ""
    return "text", f"{len(frequent):,} categories{listed}{shared}"


def _first_values(values: Sequence[Any]) -> str:
    """Join the first values to a text.

    Example:
        >>> _first_values(range(10))
        '0, 1, 2, 3, 4, 5, 6, 7, ...'
    """
    shown = [plain(str(value), 40) for value in values[:_CATEGORIES]]
    return ", ".join([*shown, *(["..."] if len(values) > _CATEGORIES else [])])
