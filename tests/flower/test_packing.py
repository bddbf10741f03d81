"""Bytes and descriptions: what is packed comes back, and nothing else is accepted."""

import json
from collections import OrderedDict

import jax
import numpy as np
import pytest

from simfbo import UserError
from simfbo.core.ledger import PerClient
from simfbo.core.problem import Point
from simfbo.flower.wire import BadPackage, decode, encode, pack, unpack

KNOWN = {"x": {"w": 0.0, "b": (0.0, 0.0)}, "y": 0.0}


@pytest.mark.parametrize(
    "tree",
    [
        1.0,
        (1.0, KNOWN["x"], None),
        Point(x=KNOWN["x"], y=2.0),
        [PerClient(3.0), {"b": 1.0, "a": (2.0,)}, ()],
        {"x": KNOWN["x"], "none": None},
        Point(None, None, (1.0, None)),
        (OrderedDict(b=1.0, a=(2.0,)), 3.0),
    ],
)
def test_a_tree_comes_back(tree):
    text = encode(tree, KNOWN)
    found = decode(text, jax.tree.leaves(tree), KNOWN)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert jax.tree.leaves(found) == jax.tree.leaves(tree)


def test_a_type_that_cannot_be_sent_is_named():
    class Mine(tuple):
        pass

    jax.tree_util.register_pytree_node(Mine, lambda m: (tuple(m), None), lambda _, c: Mine(c))
    with pytest.raises(UserError, match="A payload holds a Mine"):
        encode((Mine((1.0, 2.0)),), KNOWN)
    assert encode((Mine((1.0, 2.0)),), {"x": Mine((0.0, 0.0))}) == '["tuple", "x"]'


@pytest.mark.parametrize(
    ("text", "leaves"),
    [("[", 1), ('["os.system", null]', 1), ('"z"', 1), ("[]", 0), ('["tuple", null]', 2), ("3", 1),
     ('["tuple", null, null]', 1), ("[" * 5000, 0)],
)  # fmt: skip
def test_a_shape_that_cannot_be(text, leaves):
    with pytest.raises(BadPackage):
        decode(text, [1.0] * leaves, KNOWN)


def test_every_damage_to_a_description_is_noticed_or_harmless():
    """Whatever becomes of the text, arrays of the block's size come back, or one exception."""
    arrays = {"a": np.arange(6, dtype="float32").reshape(2, 3), "b": np.ones(0), "c": np.array(3)}
    block, description = pack(arrays)
    rng = np.random.default_rng(0)
    letters = list('[]",-0123456789.eEabflot{}:nul ')
    for _ in range(3000):
        text = list(description)
        for _ in range(rng.integers(1, 4)):
            text[rng.integers(len(text))] = letters[rng.integers(len(letters))]
        try:
            found = unpack(block, "".join(text))
        except BadPackage:
            continue
        assert sum(array.nbytes for array in found.values()) == len(block)


@pytest.mark.parametrize(
    "rows",
    [
        [["a", "float32", [2**62, 4]]],
        [["a", "float32", [True]]],
        [["a", "float32", [1.0]]],
        [["a", "object", [1]]],
        [["a", "str", [1]]],
        [["a", "S4", [1]]],
        [["a", "V4", [1]]],
        [["a", "datetime64[s]", [1]]],
        [["a", "int16", [1]], ["a", "int16", [1]]],
        [[1, "float32", [1]]],
        [["a", "float32"]],
        {"a": 1},
        None,
    ],
)
def test_an_array_that_cannot_be(rows):
    with pytest.raises(BadPackage):
        unpack(b"1234", json.dumps(rows))
