from .app import FlowerFederation, client_app, server_app
from .deployment import Deployment, clients_of, simulate

__all__ = [
    "Deployment",
    "FlowerFederation",
    "client_app",
    "clients_of",
    "server_app",
    "simulate",
]
