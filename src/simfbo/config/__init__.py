"""Configuration: TOML and flags in, the objects of a run out."""

# Their records are in the catalogue before anybody looks into it.
from simfbo.config import methods as methods
from simfbo.config import tasks as tasks
