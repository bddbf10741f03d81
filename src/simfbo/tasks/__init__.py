"""Tasks: a problem, its data, an initial point and what to measure."""

from simfbo.tasks.fair import fair
from simfbo.tasks.hyper_representation import hyper_representation
from simfbo.tasks.label_cleaning import label_cleaning
from simfbo.tasks.long_tail import long_tail
from simfbo.tasks.quadratic import Quadratic, quadratic, random_quadratic
from simfbo.tasks.regularisation import regularisation
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
