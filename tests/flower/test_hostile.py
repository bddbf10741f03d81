"""Nodes that lie about their clients and times, and messages that grow when they are read."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.app.error import Error
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from simfbo import UserError
from simfbo.core.exchange import Reason
from simfbo.flower import app as adapter
from simfbo.flower.bounded import bytes_in, inflating_at_most
from simfbo.flower.discovery import LOG, Discovery
from simfbo.flower.federation import _reported_times
from simfbo.flower.transport import Package, Response
from simfbo.flower.wire import BadPackage, pack, unpack


@pytest.fixture
def found():
    """Return a discovery of four clients, two on each of nodes 1 and 2, and who is online."""
    online = {1, 2, 3}
    transport = SimpleNamespace(nodes=lambda: set(online))
    discovery = Discovery(transport, n=4, timeout=1.0)
    report(discovery, 1, [0, 1])
    report(discovery, 2, [2, 3])
    return discovery, online


def report(discovery, node, clients, samples=None):
    settings = {"clients": clients, "samples": samples or [10] * len(clients)}
    discovery.register(node, Response("number", Package(settings, {})))


def test_before_a_run_two_nodes_with_one_client_are_named(found):
    with pytest.raises(UserError, match=r"Two nodes hold client 1 \(nodes 1 and 3\)"):
        report(found[0], 3, [1])


@pytest.mark.parametrize("away", [False, True])
def test_during_a_run_a_node_cannot_take_anothers_clients(found, away):
    discovery, online = found
    discovery.close()
    online -= {2} if away else set()
    report(discovery, 1, [0, 1, 2, 3])
    assert discovery.holders == {0: 1, 1: 1, 2: 2, 3: 2}


def test_a_new_node_may_stand_in_until_the_first_is_back(found):
    discovery, online = found
    discovery.close()
    report(discovery, 3, [2, 3])
    assert discovery.holders[2] == 2
    online.remove(2)
    report(discovery, 3, [2, 3])
    assert discovery.holders == {0: 1, 1: 1, 2: 3, 3: 3}
    online.add(2)
    report(discovery, 2, [2, 3])
    assert discovery.holders == {0: 1, 1: 1, 2: 2, 3: 2}


def test_a_node_keeps_a_client_that_nobody_had_at_the_start():
    discovery = Discovery(SimpleNamespace(nodes=lambda: {1, 2}), n=2, timeout=1.0)
    report(discovery, 1, [0])
    discovery.close()
    report(discovery, 2, [1])
    report(discovery, 1, [0, 1])
    assert discovery.holders == {0: 1, 1: 2}


@pytest.mark.parametrize(
    ("clients", "samples"),
    [([0, 0], None), ([0, 9], None), ([-1], None), ([0], [0]), ([0], [2**60]), ([0], [True]),
     ([0, 1], [3]), ("01", [1, 1]), ([0.0], [1]), ([[0]], [1])],
)  # fmt: skip
def test_a_report_that_cannot_be_is_not_used(clients, samples):
    discovery = Discovery(SimpleNamespace(nodes=lambda: {1}), n=4, timeout=1.0)
    report(discovery, 1, clients, samples)
    assert discovery.holders == discovery.samples == {}
    assert discovery.problem is not None


def test_a_node_that_reports_most_samples_is_named(found, monkeypatch):
    discovery, online = found
    warnings = []
    monkeypatch.setattr(LOG, "warning", lambda text, *parts: warnings.append(text % parts))
    assert discovery.reported_weights() == [10] * 4
    online -= {2}
    report(discovery, 3, [3], [970])
    assert discovery.reported_weights() == [10, 10, 10, 970]
    assert len(warnings) == 1
    assert warnings[0].startswith("Node 3 reports 97 % of all samples")


def test_reported_times_cannot_exceed_the_exchange():
    def times(**settings):
        return _reported_times(Package(settings, {}), sent=1000.0, total=5.0)

    assert times(began=1001.0, load=1.0, compute=2.0) == (1001.0, 1.0, 2.0)
    for wrong in (1e11, -1.0, float("nan"), float("inf"), "1", True, None, [1.0], 3):
        assert times(began=wrong, load=wrong, compute=wrong) == (0.0, 0.0, 0.0)


def test_what_a_node_says_is_shown_as_plain_text():
    for text in ("\x1b[2Jgone", "\x00", "\u202eabc", "x" * 10_000):
        reply = SimpleNamespace(has_error=lambda: True, error=Error(2, text))
        response = adapter._response("1", reply)
        assert response.reason is Reason.NODE_FAILED
        assert response.text.isprintable()
        assert len(response.text) < 300
    with pytest.raises(BadPackage) as error:
        unpack(b"", json.dumps([["a", "\ud800\x1b[2J", [1]]]))
    assert str(error.value).isprintable()


def deflated(block, times):
    """Return the objects of a message with one array, which lists its chunk several times."""
    content = RecordDict({"own": ArrayRecord({"block": Array(np.frombuffer(block, np.uint8))})})
    nested = get_all_nested_objects(content)
    objects = {number: bytes(one.deflate()) for number, one in nested.items()}
    first = b'"arraychunk_ids": [0'
    return {n: body.replace(first, first + b", 0" * times) for n, body in objects.items()}


def inflated(objects):
    return inflate_object_from_contents([*objects][-1], objects)


def test_an_array_that_lists_a_chunk_often_is_not_put_together():
    block = bytes(100_000)
    with inflating_at_most(len(block)):
        assert bytes_in(inflated(deflated(block, 0))["own"]["block"]) == block
    with inflating_at_most(len(block)), pytest.raises(ValueError, match="more bytes of arrays"):
        inflated(deflated(block, 1_000_000))  # 100 GB
    assert len(inflated(deflated(block, 2))["own"]["block"].data) > 3 * len(block)


def test_the_bytes_of_all_arrays_of_a_message_count():
    with inflating_at_most(100_000):
        inflated(deflated(bytes(90_000), 0))
        with pytest.raises(ValueError, match="more bytes of arrays"):
            inflated(deflated(bytes(90_000), 0))


@pytest.mark.parametrize("shape", ["(4,)", "(3, 1)", "()", "(1099511627776,)", "(True,)"])
@pytest.mark.parametrize("kind", ["|u1", "|O", "<f8"])
def test_a_block_is_bytes_of_the_size_it_says(kind, shape):
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"123"
    with pytest.raises(ValueError, match="no array of bytes"):
        bytes_in(Array("uint8", (3,), "numpy.ndarray", data))


def test_numbers_in_another_byte_order_arrive():
    arrays = {"a": np.array([1.5, -2.0], ">f4"), "b": np.array([[1, 2]], ">i8").T}
    found = unpack(*pack(arrays))
    assert {name: array.dtype.isnative for name, array in found.items()} == {"a": True, "b": True}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    "shape", [[0, 2**62, 2**62], [0, 2**63], [1] * 70, [0] * 70, [2**62] * 64, [10**4000] * 2000]
)
def test_a_shape_that_no_array_has(shape):
    with pytest.raises(BadPackage):
        unpack(b"", json.dumps([["a", "float32", shape]]))
    with pytest.raises(BadPackage):
        unpack(b"1234", json.dumps([["a", "float32", shape]]))


@pytest.mark.parametrize("block", ["text", [1, 2], None, 3])
def test_a_block_that_is_no_bytes(block):
    with pytest.raises(BadPackage, match="in place of bytes"):
        unpack(block, "[]")
