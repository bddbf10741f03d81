"""Trackers for `run(track=...)`: TensorBoard, MLflow, Weights & Biases, CSV, and custom ones."""

from simfbo.runs.trackers._csv import CSV
from simfbo.runs.trackers._mlflow import MLflow
from simfbo.runs.trackers._tensorboard import TensorBoard
from simfbo.runs.trackers._tracker import Tracked, TrackedRun, Tracker
from simfbo.runs.trackers._wandb import WandB
from simfbo.runs.trackers.tracking import Tracking

__all__ = [
    "CSV",
    "MLflow",
    "TensorBoard",
    "Tracked",
    "TrackedRun",
    "Tracker",
    "Tracking",
    "WandB",
]
