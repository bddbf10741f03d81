from ._check import Differences, check_loss
from ._loss import from_torch
from ._modules import SplitModule, load, parameters, split
from ._saved import Saved, restore, save
from ._task import hyper_representation

__all__ = [
    "Differences",
    "Saved",
    "SplitModule",
    "check_loss",
    "from_torch",
    "hyper_representation",
    "load",
    "parameters",
    "restore",
    "save",
    "split",
]
