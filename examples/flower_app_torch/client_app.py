"""What a node runs."""

from task import deployment

from simfbo.flower import client_app

app = client_app(deployment)
