"""However a run ends, none of its files is left open."""

import gc
import os
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from functional import Functional

from simfbo.core.ledger import Ledger
from simfbo.core.problem import Point
from simfbo.errors import UserError
from simfbo.runs import checkpoint
from simfbo.runs.history import FILE, History
from simfbo.runs.runner import run

STILL = Functional("still", lambda x, y: Point(*map(jnp.asarray, (x, y, y))), lambda s, *_: s, ())
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")


class Nobody:
    """A federation that is asked nothing."""

    def __init__(self):
        self.ledger, self.refusals = Ledger(), []


class Stop(BaseException):
    """What a kill looks like from within."""


def go(folder, error=None, **options):
    def on_round(t, record):
        if t == 1 and error is not None:
            raise error

    return run(STILL, Nobody(), np.zeros(2), np.zeros(2), rounds=2, directory=folder,
               on_round=on_round, checkpoint_seconds=0.0, **options)  # fmt: skip


def nothing(folder):
    pass


def killed(folder):
    with pytest.raises(Stop):
        go(folder, Stop)


def damage(file):
    file.write_bytes(b"?" + file.read_bytes()[1:])


def fill(folder):
    (folder / FILE).mkdir()  # cannot be opened


BEFORE = {
    "new": nothing,
    "finished": go,
    "killed": killed,
    "damaged history": lambda folder: (go(folder), damage(folder / FILE)),
    "damaged checkpoint": lambda folder: (
        go(folder), [damage(file) for file in checkpoint.files(folder)]
    ),
    "a folder for a history": fill,
}  # fmt: skip
THEN = {
    "run": go,
    "resume": lambda folder: go(folder, resume=True),
    "other seed": lambda folder: go(folder, resume=True, seed=7),
    "killed": lambda folder: go(folder, Stop, resume=True),
    "interrupted": lambda folder: go(folder, KeyboardInterrupt, resume=True),
    "error": lambda folder: go(folder, ValueError("mine"), resume=True),
    "load": History.load,
}


def still_open(folder):
    """Return the files in a folder that this process has open."""
    found = []
    for handle in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{handle}")
        except OSError:
            continue  # that of the listing itself
        if path.startswith(str(folder)):
            found.append(path)
    return found


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("then", THEN)
def test_no_file_is_left_open(tmp_path, before, then):
    gc.disable()  # nothing is closed by accident
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            BEFORE[before](tmp_path)
            try:
                kept = THEN[then](tmp_path)
            except (UserError, OSError, ValueError, Stop) as error:
                kept = error  # with its traceback, and so every variable on the way
        assert still_open(tmp_path) == [], kept
    finally:
        gc.enable()
