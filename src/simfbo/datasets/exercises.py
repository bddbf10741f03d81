"""Shoulder exercises by arm: seconds of a smartwatch's motion, as small images.

Ten people did seven exercises with each arm, about twenty times each, while the watch measured
acceleration and rotation 50 times a second (Burns et al. 2018, arXiv:1802.01489). Every arm is a
client; the arms of a person are neighbours, so the last clients are complete persons.
"""

import io
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simfbo.datasets import records
from simfbo.datasets.formats import Arrays
from simfbo.errors import UserError

FILE = "watch_dataset.npy"
_NAMES = records.ARRAYS | {("_codecs", "encode")}
_STEPS, _MEAN_OF = 10, 5  # rows of an image, and measurements averaged to a row
# The range scaled to 0..255: +-3 g of acceleration and +-8 rad/s along each axis. At most 0.4 %
# of a sensor's means are outside.
_RANGE = np.array([3.0, 3.0, 3.0, 8.0, 8.0, 8.0])
_EVERY = 5


class Recording(NamedTuple):
    """One exercise of one arm: measurements [T, 6] in time, the exercise's class and the client."""

    motion: NDArray[np.float64]
    label: int
    client: int


def arrays(files: Mapping[str, bytes]) -> Arrays:
    """Return images [N, 10, 6] of one second each, the last fifth of every recording as test.

    Args:
        files: The original file by name.

    Raises:
        UserError: If it is not that file.
    """
    try:
        loaded = sorted(
            recordings(files[FILE]), key=lambda recording: (recording.client, recording.label)
        )
    except Exception as error:  # A damaged or hostile pickle may raise almost anything.
        raise UserError(
            f"{FILE} is not a readable set of recordings ({error}): download its package again."
        ) from error
    seconds = [images(recording.motion) for recording in loaded]
    cuts = [
        len(images_of_recording) - len(images_of_recording) // _EVERY
        for images_of_recording in seconds
    ]
    train = [
        images_of_recording[:cut] for images_of_recording, cut in zip(seconds, cuts, strict=True)
    ]
    test = [
        images_of_recording[cut:] for images_of_recording, cut in zip(seconds, cuts, strict=True)
    ]
    return Arrays(
        np.concatenate(train),
        _repeated([recording.label for recording in loaded], train),
        np.concatenate(test),
        _repeated([recording.label for recording in loaded], test),
        _repeated([recording.client for recording in loaded], train),
        _repeated([recording.client for recording in loaded], test),
    )


def recordings(data: bytes) -> list[Recording]:
    """Return the recordings in the original file, in its order, without running its pickle.

    Args:
        data: A NumPy file of one pickled object: a dictionary of lists and arrays.
    """
    stream = io.BytesIO(data)
    np.lib.format.read_magic(stream)
    np.lib.format.read_array_header_1_0(stream)
    (table,) = records.array(records.load(stream.read(), _NAMES)).ravel()
    people, sides, labels = (records.array(table[key]) for key in ("subject", "side", "y"))
    # Arms in the order of people, left before right.
    clients = np.unique(2 * people + sides.astype(np.int64), return_inverse=True)[1]
    motions = map(records.array, table["X"])
    return [
        Recording(*fields)
        for fields in zip(motions, labels.tolist(), clients.tolist(), strict=True)
    ]


def images(motion: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Cut measurements [T, 6] into whole seconds, as bytes [T // 50, 10, 6]."""
    count = len(motion) // (_STEPS * _MEAN_OF)
    whole = motion[: count * _STEPS * _MEAN_OF].reshape(count, _STEPS, _MEAN_OF, len(_RANGE))
    scaled = 127.5 * (1 + whole.mean(2) / _RANGE)
    return np.rint(scaled.clip(0, 255)).astype(np.uint8)


def _repeated(numbers: list[int], parts: list[NDArray[np.uint8]]) -> NDArray[np.int32]:
    """Repeat each recording's number once for each of its images."""
    return np.repeat(np.array(numbers, np.int32), [len(part) for part in parts])
