"""The example app from a PyTorch module: nodes and server run it without PyTorch."""

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flwr.cli.build import build_fab_from_disk

from simfbo import run
from simfbo.flower import FlowerFederation, simulate

APP = Path(__file__).parents[2] / "examples" / "flower_app_torch"
CONFIG = {"rounds": 3, "cohort": 4, "seed": 0, "timeout": 60.0}


def module(name):
    spec = importlib.util.spec_from_file_location(f"torch_app_{name}", APP / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class Refuser:
    """Refuses to import PyTorch, as if it were not installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)


@pytest.fixture
def no_torch(monkeypatch):
    """Let every import of PyTorch fail."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refuser, *sys.meta_path])


def test_flower_without_pytorch_is_the_simulation(single_precision, no_torch, flower):
    plan = module("task").deployment(CONFIG)
    wanted = simulate(plan)
    grid = flower.Grid(plan, flower.parts(2))
    federation = FlowerFederation(grid, plan, poll=0.0)
    federation.connect()
    found = run(plan.algorithm, federation, plan.x0, plan.y0, rounds=3, seed=0)
    for name, start in plan.x0.items():
        np.testing.assert_allclose(found.state.x[name], wanted.state.x[name], atol=1e-6)
        assert np.abs(found.state.x[name] - start).max() > 1e-3
    assert wanted.records[-1]["test_accuracy"] > wanted.records[0]["test_accuracy"] + 0.2


@pytest.mark.slow
def test_the_file_holds_what_the_module_computes(single_precision):
    pytest.importorskip("torch")
    from simfbo.torch import from_torch

    task, model = module("task"), module("model")
    batch = task.load_client(0, {})[0]
    for size in (1, 7, 32):  # 7 was not traced: sample by sample
        rows = jax.tree.map(lambda a, size=size: a[:size], batch)
        for name in ("upper", "lower", "accuracy"):
            saved = task.SAVED.losses[name](task.SAVED.x0, task.SAVED.y0, rows)
            fresh = from_torch(getattr(model, name))(task.SAVED.x0, task.SAVED.y0, rows)
            np.testing.assert_allclose(saved, fresh, rtol=1e-6)


def test_flower_packs_the_file():
    assert b"problem.json" in build_fab_from_disk(APP)
