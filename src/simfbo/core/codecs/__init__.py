"""Codecs: messages in fewer bytes, by channel and direction.

    federation = SimulatedFederation(data, codecs=Codecs(
        up=Point(x=lowrank(32, 0.3), y=dithered(0.5), v=dithered(0.5)),
        down=Point(x=relative_to_start(dithered(4)), y=dithered(0.5), v=dithered(0.5))))

docs/explanation-communication.md says which to choose, and what they cost.
"""

from simfbo.core.codecs._dithered import dithered
from simfbo.core.codecs._eden import eden
from simfbo.core.codecs._lowrank import lowrank
from simfbo.core.codecs._plain import bfloat16, float32
from simfbo.core.codecs._sparse import random_subset, top_k
from simfbo.core.codecs.codec import BadMessage, Codec
from simfbo.core.codecs.messages import Codecs, relative_to_start

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
