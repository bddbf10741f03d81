"""Tests of the exercises: small made-up recordings, and the real ones if they were downloaded."""

import hashlib
import io
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simfbo import datasets, partition
from simfbo.config.build_task import build_task
from simfbo.config.run import checked
from simfbo.datasets import exercises
from simfbo.datasets import package_clients as clients
from simfbo.datasets.registry import IMAGE_SETS
from simfbo.errors import UserError

PEOPLE, CLASSES = (3, 7), 3


def table() -> dict[str, Any]:
    """Return the recordings of two people with two arms, in a mixed order, 5 or 10 seconds each."""
    rng = np.random.default_rng(0)
    keys = [(person, side, c) for c in range(CLASSES) for side in (1, 0) for person in PEOPLE]
    return {
        # Columns first, as in the original.
        "X": [np.asfortranarray(rng.normal(size=(250 + 253 * (c == 1), 6))) for *_, c in keys],
        "y": np.array([c for *_, c in keys]),
        "subject": np.array([person for person, *_ in keys]),
        "side": np.array([float(side) for _, side, _ in keys]),
        "y_labels": ["a", "b", "c"],
    }


def npy(content: object, protocol: int = 2) -> bytes:
    """Return a NumPy file of one pickled object, in the original's protocol."""
    holder = np.empty((), object)
    holder[()] = content
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        stream, {"descr": "|O", "fortran_order": False, "shape": ()}
    )
    return stream.getvalue() + pickle.dumps(holder, protocol)


def pin(monkeypatch: pytest.MonkeyPatch, data: bytes, archive: bytes = b"") -> None:
    """Pin a file and an archive as those of the exercises."""
    real = IMAGE_SETS["exercises"]
    source = real.sources[0]._replace(sha256=hashlib.sha256(archive).hexdigest())
    files = {exercises.FILE: f"sha256:{hashlib.sha256(data).hexdigest()}"}
    monkeypatch.setitem(IMAGE_SETS, "exercises", real._replace(files=files, sources=(source,)))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a data folder with small recordings pinned as the exercises; no client can start."""
    data = npy(table())
    pin(monkeypatch, data)
    monkeypatch.delattr(clients, "run_client")
    (tmp_path / exercises.FILE).write_bytes(data)
    return tmp_path


def test_seconds_become_bytes() -> None:
    motion = np.zeros((124, 6))
    motion[50:55, 0], motion[55:60, 1] = 1.5, np.arange(5) - 3.5  # means 1.5 and -1.5
    motion[60:65, 3], motion[65:70, 5] = 80.0, -8.0
    motion[120:] = 99.0  # not a whole second
    found = exercises.images(motion)
    assert (found.shape, found.dtype) == ((2, 10, 6), np.uint8)
    assert (found[0] == 128).all()
    changed = {tuple(place): found[1][tuple(place)] for place in np.argwhere(found[1] != 128)}
    assert changed == {(0, 0): 191, (1, 1): 64, (2, 3): 255, (3, 5): 0}


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_recordings_are_read_as_they_were_pickled(protocol: int) -> None:
    content = table()
    found = exercises.recordings(npy(content, protocol))
    for one, motion in zip(found, content["X"], strict=True):
        np.testing.assert_array_equal(one.motion, motion)
    assert [one.label for one in found] == content["y"].tolist()
    arms = [(3, 0), (3, 1), (7, 0), (7, 1)]
    pairs = zip(content["subject"].tolist(), content["side"].tolist(), strict=True)
    assert [one.client for one in found] == [arms.index(pair) for pair in pairs]


def test_the_end_of_every_recording_is_for_tests(folder: Path) -> None:
    data = datasets.load("exercises", folder)
    assert data.train_clients is not None
    assert data.test_clients is not None
    assert (data.train_images.shape, data.test_images.shape) == ((64, 10, 6), (16, 10, 6))
    assert data.train_clients.tolist() == [arm for arm in range(4) for _ in range(16)]
    assert data.test_clients.tolist() == [arm for arm in range(4) for _ in range(4)]
    assert data.train_labels.tolist() == ([0] * 4 + [1] * 8 + [2] * 4) * 4
    assert data.test_labels.tolist() == [0, 1, 1, 2] * 4
    content = table()
    last = next(
        motion
        for motion, c, person, side in zip(
            content["X"], content["y"], content["subject"], content["side"], strict=True
        )
        if (c, person, side) == (1, 7, 0)
    )
    seconds = exercises.images(last)
    np.testing.assert_array_equal(data.test_images[9:11], seconds[8:])
    np.testing.assert_array_equal(data.train_images[36:44], seconds[:8])


def test_the_wheel_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data, buffer = npy(table()), io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"seglearn/data/{exercises.FILE}"), data)
    pin(monkeypatch, data, buffer.getvalue())

    def run(tool: str, command: Sequence[str], folder: Path, timeout: int) -> None:
        assert (tool, command[-1]) == ("pip", "seglearn==1.2.5")
        (folder / "a.whl").write_bytes(buffer.getvalue())

    monkeypatch.setattr(clients, "run_client", run)
    assert len(datasets.load("exercises", tmp_path).train_labels) == 64
    assert (tmp_path / "exercises" / exercises.FILE).read_bytes() == data


def test_offline_sentence_names_the_one_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"put watch_dataset\.npy into a folder and set"):
        datasets.load("exercises", tmp_path, offline=True)


class Call:
    """A call that a pickle asks for."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Ask for the evaluation of a text."""
        return eval, ("open('made', 'w')",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (Call(), "it asks for '(builtins|__builtin__).eval', which was not run"),
        ({"X": []}, "'subject'"),
        ({**table(), "y": np.zeros(12, np.float32)}, "numbers of the kind <f4"),
        ({**table(), "y": np.zeros(11)}, "zip"),
    ],
)
def test_anything_else_is_refused_and_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: object, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"not a readable set of recordings .*{reason}"):
        exercises.arrays({exercises.FILE: npy(content)})
    assert list(tmp_path.iterdir()) == []


def test_natural_clients_enter_the_task(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("simfbo.config.tasks.IMAGE_CLIENTS", {"exercises": 4})
    settings = {"name": "hyper-representation", "dataset": "exercises", "clients": 4, "unseen": 2}
    task = build_task(checked({"task": settings}, {}), folder)
    data = datasets.load("exercises", folder)
    assert data.train_clients is not None
    assert task.data.n == 2
    for level, size in ((task.data.lower, 13), (task.data.upper, 3)):
        owners = data.train_clients[np.asarray(level.rows)]
        assert owners.tolist() == [0] * size + [1] * size
    assert task.y0.weight.shape == (200, CLASSES)
    assert [rows.tolist() for rows in partition.by_user(data.train_clients)] == [
        list(range(start, start + 16)) for start in range(0, 64, 16)
    ]


@pytest.mark.parametrize("name", ["label-cleaning", "long-tail"])
def test_natural_clients_enter_practical_tasks(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str
) -> None:
    monkeypatch.setattr("simfbo.config.tasks.IMAGE_CLIENTS", {"exercises": 4})
    options = {"clean": 8} if name == "label-cleaning" else {"imbalance": 2, "folds": 2}
    settings = {"name": name, "dataset": "exercises", "clients": 4, **options}
    assert build_task(checked({"task": settings}, {}), folder).data.n == 4


def test_real_recordings() -> None:
    try:
        data = datasets.load("exercises", offline=True)
    except UserError:
        pytest.skip("the exercises have not been downloaded")
    assert (data.train_images.shape, data.test_images.shape) == ((3907, 10, 6), (910, 10, 6))
    assert data.train_clients is not None
    sizes = np.bincount(data.train_clients)
    assert (len(sizes), sizes.min(), int(np.median(sizes)), sizes.max()) == (20, 117, 206, 252)
    assert np.bincount(data.train_labels).tolist() == [424, 641, 648, 599, 599, 492, 504]
    beyond = np.isin(data.train_images, (0, 255)).mean((0, 1))
    assert beyond.max() < 0.004
