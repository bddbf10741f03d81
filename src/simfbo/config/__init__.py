"""Configuration: from TOML and flags to the objects of a run."""

# Importing them registers the library's records in the catalogue.
from simfbo.config import methods as methods
from simfbo.config import tasks as tasks
