"""Fitted models in the format ONNX, by skl2onnx.

ONNX has neither missing texts nor a column that rare categories share. So "" stands for a missing
text, and every rare category gets a column of its own with the coefficient of the shared one.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import OneHotEncoder

from simfbo.errors import UserError, require
from simfbo.estimators._tabular import FederatedTabular
from simfbo.runs.files import write_atomic

if TYPE_CHECKING:
    import onnx

Plain = Callable[[np.ndarray], Any]


def exported(
    tabular: FederatedTabular | None, coef: np.ndarray, plain: Plain, path: str | Path | None
) -> "onnx.ModelProto":
    """Return a model in the format ONNX.

    Args:
        tabular: what turns a table into numbers; None if it holds only numbers.
        coef: the coefficients; the last axis counts features.
        plain: (coefficients) -> a model of scikit-learn.
        path: where to write it as well.
    """
    convert, types = require("skl2onnx", "onnx"), require("skl2onnx.common.data_types", "onnx")
    if tabular is None:
        whole = plain(coef)
        inputs = [("X", types.FloatTensorType([None, coef.shape[-1]]))]
    else:
        whole = Pipeline([("table", _table(tabular)), ("model", plain(_widened(tabular, coef)))])
        kinds = {True: types.StringTensorType, False: types.FloatTensorType}
        inputs = [(name, kinds[name in tabular.categories_]([None, 1])) for name in tabular.inputs]
    options = {"zipmap": False} if hasattr(whole, "predict_proba") else {}
    found = convert.to_onnx(whole, initial_types=inputs, options=options)
    if path is not None:
        write_atomic(Path(path), found.SerializeToString())
    return found


def _table(tabular: FederatedTabular) -> ColumnTransformer:
    """Return what turns a table into numbers, in the order of its columns, as ONNX can do it."""
    parts = [(f"column{j}", _column(tabular, name), [j]) for j, name in enumerate(tabular.inputs)]
    columns = [np.array(_rows(tabular, name), object) for name in tabular.inputs]
    most = max(map(len, columns))
    rows = np.stack([np.resize(column, most) for column in columns], 1)
    return ColumnTransformer(parts, sparse_threshold=0).fit(rows)


def _column(tabular: FederatedTabular, name: str) -> Any:
    """Return what turns a column into numbers; it will be fitted to `_rows`."""
    if name not in tabular.categories_:
        return SimpleImputer(strategy="median")  # of equal numbers: exactly that number
    known: Any = [_rows(tabular, name)]
    return OneHotEncoder(categories=known, handle_unknown="ignore", sparse_output=False)


def _rows(tabular: FederatedTabular, name: str) -> list[Any]:
    """Return the number that fills gaps, or all categories."""
    if name not in tabular.categories_:
        return [tabular.fill_[tabular.numeric_.index(name)]]
    texts = [*tabular.categories_[name], *tabular.infrequent_[name]]
    if None in texts and "" in texts:
        raise UserError(
            f'Column {name!r} has the category "", which stands for missing in ONNX: replace it, '
            "or use export()."
        )
    return ["" if text is None else text for text in texts]


def _widened(tabular: FederatedTabular, coef: np.ndarray) -> np.ndarray:
    """Return coefficients in which every rare category has one."""
    places: list[int] = []
    for name in tabular.inputs:
        first = places[-1] + 1 if places else 0
        kept = len(tabular.categories_.get(name, [""]))  # a number has one column
        rare = len(tabular.infrequent_.get(name, []))
        places += [*range(first, first + kept), *[first + kept] * rare]
    return coef[..., places]
