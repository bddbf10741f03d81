"""What holds against hostile or broken clients: aggregators, and the detection of anomalies."""

from simfbo.robust import aggregation, anomalies

__all__ = ["aggregation", "anomalies"]
