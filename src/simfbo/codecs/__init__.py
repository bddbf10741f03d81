"""Codecs: messages in fewer bytes, by channel and direction.

    federation = SimulatedFederation(data, codecs=Codecs(
        up=Point(x=lowrank(32, 0.3), y=dithered(0.5), v=dithered(0.5)),
        down=Point(x=relative_to_start(dithered(4)), y=dithered(0.5), v=dithered(0.5))))

docs/explanation-communication.md compares their costs and applications.
"""

from simfbo.codecs._dithered import dithered
from simfbo.codecs._eden import eden
from simfbo.codecs._lowrank import lowrank
from simfbo.codecs._plain import bfloat16, float32
from simfbo.codecs._sparse import random_subset, top_k
from simfbo.codecs.codec import BadMessage, Codec
from simfbo.codecs.messages import Codecs, relative_to_start

__all__ = [
    "BadMessage",
    "Codec",
    "Codecs",
    "bfloat16",
    "dithered",
    "eden",
    "float32",
    "lowrank",
    "random_subset",
    "relative_to_start",
    "top_k",
]
