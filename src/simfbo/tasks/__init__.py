"""Tasks: a problem with its data, an initial point, metrics and baselines."""

from simfbo.tasks._fair import fair, group_weights
from simfbo.tasks._hyper_representation import hyper_representation
from simfbo.tasks._label_cleaning import label_cleaning, trust_in
from simfbo.tasks._long_tail import long_tail
from simfbo.tasks._private_heads import private_heads
from simfbo.tasks._quadratic import Quadratic, quadratic, random_quadratic
from simfbo.tasks._regularisation import penalties, regularisation
from simfbo.tasks._solve import solve
from simfbo.tasks.task import Baseline, Task

__all__ = [
    "Baseline",
    "Quadratic",
    "Task",
    "fair",
    "group_weights",
    "hyper_representation",
    "label_cleaning",
    "long_tail",
    "penalties",
    "private_heads",
    "quadratic",
    "random_quadratic",
    "regularisation",
    "solve",
    "trust_in",
]
