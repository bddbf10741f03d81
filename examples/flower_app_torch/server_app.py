"""What the server runs."""

from task import deployment

from simfbo.flower import server_app

app = server_app(deployment)
