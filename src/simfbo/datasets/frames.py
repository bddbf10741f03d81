"""Data frames with text, categories and gaps, and a column of clients."""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from simfbo.errors import require

if TYPE_CHECKING:
    import pandas


class FrameData(NamedTuple):
    """The rows of one data frame.

    Attributes:
        frame: The unprocessed features, and the clients' column if there is one.
        target: The values to predict [N]: numbers, or classes as text.
        clients: The column of the client that holds a row; None if there are no natural clients.
        name: The name passed to `load_frame`.
    """

    frame: "pandas.DataFrame"
    target: np.ndarray
    clients: str | None
    name: str


class Columns(NamedTuple):
    """The meaning of some columns of a CSV file; all others are features.

    Attributes:
        file: The name of the file.
        target: The column to predict; rows without it are left out.
        clients: The column with the clients, if there are natural ones.
        ids: Columns that only number rows, people or smaller groups.
        names: New names for columns.
    """

    file: str
    target: str
    clients: str | None = None
    ids: tuple[str, ...] = ()
    names: Mapping[str, str] = {}


FRAMES = {
    "schools": Columns("MathAchieve.csv", "MathAch", "School"),
    "exam": Columns("Exam.csv", "normexam", "school", ("student",)),
    "districts": Columns("Contraception.csv", "use", "district", ("woman",)),
    "mortgages": Columns("HMDA.csv", "deny"),
    "voters": Columns("Chile.csv", "vote", "region"),
    "values": Columns("WVS.csv", "poverty", "country"),
    "vaccinations": Columns("guImmun.csv", "immun", "comm", ("kid", "mom"), {"comm": "community"}),
    "attainment": Columns("ScotsSec.csv", "attain", "second", ("primary",), {"second": "school"}),
    # aritPOST is a test taken together with the target.
    "pupils": Columns(
        "bdf.csv",
        "langPOST",
        "schoolNR",
        ("pupilNR", "classNR", "aritPOST"),
        {"schoolNR": "school"},
    ),
    "houses": Columns("HousePrices.csv", "price"),
    "melanoma": Columns("Mmmec.csv", "deaths", "nation", ("region", "county")),
}
"""The meaning of the columns of each frame, by name."""


def read(name: str, columns: Columns, files: Mapping[str, bytes]) -> FrameData:
    """Read the data frame in a CSV file.

    Args:
        name: The frame's name.
        columns: The meaning of its columns.
        files: File name to content.
    """
    rows: Any = require("pandas", "pandas").read_csv(io.BytesIO(files[columns.file]))
    rows = rows[rows[columns.target].notna()].reset_index(drop=True)
    target = rows.pop(columns.target).to_numpy()
    frame = rows.drop(columns=["rownames", *columns.ids]).rename(columns=dict(columns.names))
    clients = columns.names.get(columns.clients or "", columns.clients)
    return FrameData(frame, target, clients, name)
