"""Tables: rows with features, a target, a group and, if there are any, natural clients."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TableData(NamedTuple):
    """The rows of one table.

    Attributes:
        features: Numbers [N, d] in their own units, then categories as 0 or 1 without the first in
            sorted order; no column of ones.
        names: The names of the d features: a column's name, or `column=category`.
        target: The values to predict [N]; 0 or 1 if `binary`.
        binary: Whether the target is a class.
        clients: The client that holds each row [N], numbered from 0 in the order of the original
            numbers; None if the table has no natural clients.
        groups: The group of each row [N], an index into `group_names`.
        group_names: The groups, sorted.
        name: The name passed to `load_table`.
    """

    features: NDArray[np.float64]
    names: tuple[str, ...]
    target: NDArray[np.float64]
    binary: bool
    clients: NDArray[np.int32] | None
    groups: NDArray[np.int32]
    group_names: tuple[str, ...]
    name: str


class Layout(NamedTuple):
    """The meaning of the columns of a CSV file.

    Attributes:
        file: The name of the file.
        target: The column to predict.
        positive: The category of the target that counts as 1; None if the target is a number.
        clients: The column with the client's number, if there is one.
        groups: The column with the group.
        numbers: The features that are numbers.
        categories: The features that are categories, even if they are written as numbers.
    """

    file: str
    target: str
    positive: str | None
    clients: str | None
    groups: str
    numbers: tuple[str, ...]
    categories: tuple[str, ...]


# MEANSES is the school's mean SES plus 0.006, rounded: not an exact combination of other columns.
SCHOOLS = Layout(
    file="MathAchieve.csv",
    target="MathAch",
    positive=None,
    clients="School",
    groups="Minority",
    numbers=("SES", "MEANSES"),
    categories=("Minority", "Sex"),
)
# Without type, which is single exactly if schgend is not mixed: collinear with two indicators.
EXAM = Layout(
    file="Exam.csv",
    target="normexam",
    positive=None,
    clients="school",
    groups="sex",
    numbers=("schavg", "standLRT"),
    categories=("schgend", "vr", "intake", "sex"),
)
DISTRICTS = Layout(
    file="Contraception.csv",
    target="use",
    positive="Y",
    clients="district",
    groups="urban",
    numbers=("age",),
    categories=("livch", "urban"),
)
# chist and mhist look like numbers but are codes: 4 and 2 mean that there is no history.
MORTGAGES = Layout(
    file="HMDA.csv",
    target="deny",
    positive="yes",
    clients=None,
    groups="afam",
    numbers=("pirat", "hirat", "lvrat", "unemp"),
    categories=(
        *("chist", "mhist", "phist", "selfemp"),
        *("insurance", "condomin", "single", "hschool"),
    ),
)


def read(name: str, layout: Layout, files: Mapping[str, bytes]) -> TableData:
    """Read the table in a CSV file.

    Args:
        name: The table's name.
        layout: The meaning of the columns.
        files: File name to content.
    """
    columns = _columns(files[layout.file])
    features = _features(layout, columns)
    group_names, groups = np.unique(columns[layout.groups], return_inverse=True)
    return TableData(
        features=np.stack(list(features.values()), axis=1),
        names=tuple(features),
        target=_target(layout, columns[layout.target]),
        binary=layout.positive is not None,
        clients=None if layout.clients is None else _numbered(columns[layout.clients]),
        groups=groups.astype(np.int32),
        group_names=tuple(group_names.tolist()),
        name=name,
    )


def _columns(data: bytes) -> dict[str, tuple[str, ...]]:
    """Return the cells of each column of a CSV file."""
    header, *rows = csv.reader(io.StringIO(data.decode()))
    return dict(zip(header, zip(*rows, strict=True), strict=True))


def _features(
    layout: Layout, columns: Mapping[str, Sequence[str]]
) -> dict[str, NDArray[np.float64]]:
    """Return each feature under its name, numbers first."""
    features = {name: np.array(columns[name], np.float64) for name in layout.numbers}
    for name in layout.categories:
        categories, codes = np.unique(columns[name], return_inverse=True)
        for code, category in enumerate(categories[1:], start=1):
            features[f"{name}={category}"] = (codes == code).astype(np.float64)
    return features


def _target(layout: Layout, cells: Sequence[str]) -> NDArray[np.float64]:
    """Return the target as numbers, or as 1 for the positive category and 0 otherwise."""
    if layout.positive is None:
        return np.array(cells, np.float64)
    return (np.array(cells) == layout.positive).astype(np.float64)


def _numbered(cells: Sequence[str]) -> NDArray[np.int32]:
    """Number clients from 0, in the numeric order of their original numbers."""
    return np.unique(np.array(cells, np.int64), return_inverse=True)[1].astype(np.int32)
