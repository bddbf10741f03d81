"""Tasks: a problem, its data, an initial point and what to measure."""

from simfbo.tasks.hyper_representation import hyper_representation
from simfbo.tasks.quadratic import Quadratic, quadratic, random_quadratic
from simfbo.tasks.task import Task

__all__ = ["Quadratic", "Task", "hyper_representation", "quadratic", "random_quadratic"]
