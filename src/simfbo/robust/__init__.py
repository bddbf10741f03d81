"""Robustness against hostile or broken clients: aggregators and anomaly detection."""

from simfbo.robust import aggregation, anomalies

__all__ = ["aggregation", "anomalies"]
