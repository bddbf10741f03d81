"""Tasks: a problem, its data, an initial point and what to measure."""

from simfbo.tasks._fair import fair
from simfbo.tasks._hyper_representation import hyper_representation
from simfbo.tasks._label_cleaning import label_cleaning
from simfbo.tasks._long_tail import long_tail
from simfbo.tasks._quadratic import Quadratic, quadratic, random_quadratic
from simfbo.tasks._regularisation import regularisation
from simfbo.tasks.task import Baseline, Task

__all__ = [
    "Baseline",
    "Quadratic",
    "Task",
    "fair",
    "hyper_representation",
    "label_cleaning",
    "long_tail",
    "quadratic",
    "random_quadratic",
    "regularisation",
]
