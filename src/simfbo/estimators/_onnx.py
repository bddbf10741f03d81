"""Fitted models in the format ONNX, by skl2onnx.

ONNX supports neither missing strings nor a common column of rare categories. So "" stands for a
missing string, and every rare category has a separate column with the common coefficient.
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
    """Convert a model to ONNX.

    Args:
        tabular: the preprocessing; None for a table of numbers.
        coef: the coefficients; features are the last axis.
        plain: (coefficients) -> a model of scikit-learn.
        path: a file to write, or None.
    """
    convert, types = require("skl2onnx", "onnx"), require("skl2onnx.common.data_types", "onnx")
    if tabular is None:
        model = plain(coef)
        inputs = [("X", types.FloatTensorType([None, coef.shape[-1]]))]
    else:
        model = Pipeline([("table", _table(tabular)), ("model", plain(_widened(tabular, coef)))])
        kinds = {True: types.StringTensorType, False: types.FloatTensorType}
        inputs = [(name, kinds[name in tabular.categories_]([None, 1])) for name in tabular.inputs]
    options = {"zipmap": False} if hasattr(model, "predict_proba") else {}
    proto = convert.to_onnx(model, initial_types=inputs, options=options)
    if path is not None:
        write_atomic(Path(path), proto.SerializeToString())
    return proto


def _table(tabular: FederatedTabular) -> ColumnTransformer:
    """Create the preprocessing of a table from transformers that ONNX supports."""
    transformers = [
        (f"column{j}", _column(tabular, name), [j]) for j, name in enumerate(tabular.inputs)
    ]
    columns = [np.array(_rows(tabular, name), object) for name in tabular.inputs]
    longest = max(map(len, columns))
    rows = np.stack([np.resize(column, longest) for column in columns], 1)
    return ColumnTransformer(transformers, sparse_threshold=0).fit(rows)


def _column(tabular: FederatedTabular, name: str) -> Any:
    """Create the transformer of a column, to be fitted to `_rows`."""
    if name not in tabular.categories_:
        return SimpleImputer(strategy="median")  # the median of equal numbers is exact
    categories: Any = [_rows(tabular, name)]
    return OneHotEncoder(categories=categories, handle_unknown="ignore", sparse_output=False)


def _rows(tabular: FederatedTabular, name: str) -> list[Any]:
    """Return the imputed number, or all categories."""
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
    """Repeat the common coefficient of rare categories for each of them."""
    indices: list[int] = []
    for name in tabular.inputs:
        first = indices[-1] + 1 if indices else 0
        frequent = len(tabular.categories_.get(name, [""]))  # a number has one column
        rare = len(tabular.infrequent_.get(name, []))
        indices += [*range(first, first + frequent), *[first + frequent] * rare]
    return coef[..., indices]
