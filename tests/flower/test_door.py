"""The door of a SuperLink: which requests pass, without starting Flower."""

import asyncio
import base64
import datetime
import json
import os
import time

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from simfbo.flower.ops import certificates, door, operators

INSIDE, OUTSIDE = "127.0.0.1", "192.0.2.7"
LIST = "/v1/control/list-runs"
PULL = "/v1/fleet/pull-messages"


class Site:
    """A door, its keys, and what has passed it."""

    def __init__(self, folder):
        self.nodes, self.operators = folder / "keys", folder / "operators"
        certificates.make_key(self.nodes / "node-1")
        certificates.make_key(self.operators / "anna")
        self.passed, self.welcome, self._nonces = [], [], set()
        keys = door.Keys(self.nodes, self.operators, self.reserve)
        self.door = door.Door(self.app, keys, self.welcome.append)

    def reserve(self, purpose, nonce, expiry):
        known = (purpose, nonce) in self._nonces
        self._nonces.add((purpose, nonce))
        return not known

    async def app(self, scope, receive, send):
        body = await door._whole(receive)
        self.passed.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one", b"two", b"three"):
            await send({"type": "http.response.body", "body": part, "more_body": part != b"three"})

    def ask(self, path, headers, body=b"body", at=OUTSIDE, method="POST", during=lambda: None):
        """Return status and content of the response to a request."""
        sent, unread = [], [body]

        async def receive():
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        async def send(message):
            sent.append(message)
            during()

        scope = {"type": "http", "method": method, "path": path, "server": (at, 9300)}
        scope |= {"headers": headers, "client": ("192.0.2.9", 4)}
        asyncio.run(self.door(scope, receive, send))
        if sent[0]["status"] != 200:
            assert unread == [body], "a refused request was read"
            assert (b"connection", b"close") in sent[0]["headers"]
        return sent[0]["status"], b"".join(m.get("body", b"") for m in sent)

    def by_anna(self, path=LIST, body=b"body", method="POST"):
        """Return the headers of a request of an operator."""
        return [
            (
                b"simfbo-operator",
                operators.sign(self.operators / "anna", method, path, body).encode(),
            )
        ]

    def by_node(self, name="node-1", public="node-1", age=0.0):
        """Return the headers of a request of a node."""
        private = load_ssh_private_key((self.nodes / name).read_bytes(), None)
        then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)
        signed = then.isoformat().encode()
        sent = certificates.node_form(self.nodes / f"{public}.pub")
        return [
            (b"flwr-public-key", base64.b64encode(sent)),
            (b"flwr-timestamp", signed),
            (b"flwr-signature", base64.b64encode(private.sign(signed, ec.ECDSA(hashes.SHA256())))),
        ]


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def test_without_a_key_nothing_that_flower_has_can_be_reached_from_outside(site):
    paths = {path for _, path in PROTOBUF_REQUEST_TYPES}
    assert {"/v1/control/start-run", PULL, "/v1/runtime/acquire-task"} <= paths
    others = {"/health", "/docs", "/openapi.json", "/v1/runtime/responses", "/", "/v1/fleet/a/b"}
    spoofed = [(b"x-forwarded-for", b"127.0.0.1"), (b"host", b"127.0.0.1")]
    for path in sorted(paths | others):
        for headers in ([], spoofed, [(b"host", b"x/v1/fleet/a?")]):
            assert site.ask(path, headers)[0] in (400, 401, 404), path
    assert site.passed == site.welcome == []


def test_an_operator_passes_on_this_machine_only(site):
    assert site.ask(LIST, site.by_anna(), at=INSIDE) == (200, b"onetwothree")
    assert site.passed == [(LIST, b"body")]
    assert site.ask(LIST, site.by_anna(), at=OUTSIDE)[0] == 404
    assert site.ask(LIST, [], at=INSIDE)[0] == 401
    assert site.ask("/health", [], at=INSIDE)[0] == 200


def test_a_signature_is_good_for_one_request_once(site):
    headers = site.by_anna()
    assert site.ask(LIST, headers, at=INSIDE)[0] == 200
    status, text = site.ask(LIST, headers, at=INSIDE)
    assert status == 401
    assert b"the request was sent before" in text
    assert site.ask("/v1/control/stop-run", site.by_anna(), at=INSIDE)[0] == 401
    assert site.ask(LIST, site.by_anna(method="GET"), at=INSIDE)[0] == 401
    assert site.ask(LIST, [*site.by_anna(), *site.by_anna()], at=INSIDE)[0] == 401
    with pytest.raises(AssertionError, match="was read"):  # only after the signature was checked
        site.ask(LIST, site.by_anna(), b"other", at=INSIDE)
    assert len(site.passed) == 1


@pytest.mark.parametrize("change", [
    lambda words: ["x", *words[1:]],
    lambda words: [words[0], str(float(words[1]) + 1), *words[2:]],
    lambda words: [words[0], "nan", *words[2:]],
    lambda words: [*words[:2], "0", *words[3:]],
    lambda words: [*words[:3], "0" * 64, words[4]],
    lambda words: [*words[:4], "AAAA"],
    lambda words: [*words[:4], "not base64!"],
    lambda words: words[:4],
    lambda words: [],
])  # fmt: skip
def test_a_changed_signature_is_refused(site, change):
    ((name, text),) = site.by_anna()
    changed = " ".join(change(text.decode().split())).encode()
    assert site.ask(LIST, [(name, changed)], at=INSIDE)[0] == 401


def test_an_old_signature_is_refused(site, monkeypatch):
    headers = site.by_anna()
    later = time.time() + operators.LASTS + 1
    monkeypatch.setattr(operators.time, "time", lambda: later)
    assert b"has expired" in site.ask(LIST, headers, at=INSIDE)[1]


def test_a_revoked_operator_is_refused_at_once(site):
    headers = site.by_anna()

    def revoke():
        if operators.listed(site.operators):
            operators.revoke(site.operators, "anna")

    assert site.ask(LIST, headers, at=INSIDE, during=revoke) == (200, b"")  # a log that is read
    certificates.make_key(site.operators.parent / "anna")
    os.replace(site.operators.parent / "anna", site.operators / "anna")
    status, text = site.ask(LIST, site.by_anna(), at=INSIDE)
    assert status == 401
    assert b"not an operator's" in text


def test_an_admitted_node_passes_from_outside_once_per_signature(site):
    headers = site.by_node()
    assert site.ask(PULL, headers)[0] == 200
    assert site.welcome == [("192.0.2.9", 4)]
    status, text = site.ask(PULL, headers)
    assert status == 401
    assert b"sent before" in text
    assert site.ask(PULL, site.by_node())[0] == 200
    assert site.ask(LIST, site.by_node())[0] == 404
    assert site.ask(LIST, site.by_node(), at=INSIDE)[0] == 401


def test_what_is_not_signed_by_an_admitted_node_is_refused(site):
    certificates.make_key(site.nodes / "mallory")
    os.replace(site.nodes / "mallory.pub", site.nodes / "mallory")
    certificates.make_key(site.nodes / "node-2")
    assert site.ask(PULL, site.by_node("node-2", "node-1"))[0] == 401
    assert site.ask(PULL, site.by_node(age=400))[0] == 401
    assert site.ask(PULL, site.by_node(age=-60))[0] == 401
    assert site.ask(PULL, site.by_node()[:2])[0] == 401
    assert site.ask(PULL, [*site.by_node(), *site.by_node()])[0] == 401
    naive = [(name, b"2026-01-01T00:00:00" if name == b"flwr-timestamp" else value)
             for name, value in site.by_node()]  # fmt: skip
    assert site.ask(PULL, naive)[0] == 401
    headers = site.by_node("node-2", "node-2")
    (site.nodes / "node-2.pub").unlink()  # no longer admitted
    assert site.ask(PULL, headers)[0] == 401
    status, text = site.ask("/v1/fleet/activate-node", headers)
    assert status == 412
    assert json.loads(text)["code"] == 2004  # so that the node's log shows the sentence
    assert b"run 'simfbo flower admit' on the server" in text
    assert site.passed == []


def test_a_replaced_node_key_is_valid_for_a_while_only(site):
    old = site.nodes / "node-1.old.pub"
    os.replace(site.nodes / "node-1.pub", old)
    before = site.by_node(public="node-1.old")
    certificates.make_key(site.nodes / "node-1")
    assert site.ask(PULL, site.by_node())[0] == 200
    assert site.ask(PULL, before)[0] == 200
    past = time.time() - door.OVERLAP - 1
    os.utime(old, (past, past))
    assert old.exists()
    assert site.ask(PULL, site.by_node())[0] == 200  # the new key is in use: the old one goes
    assert not old.exists()


def test_an_admitted_node_cannot_send_without_end(site, monkeypatch):
    monkeypatch.setattr(door, "LARGEST", 3)
    with pytest.raises(door.Refusal, match="too long"):
        site.ask(PULL, site.by_node(), b"four")
    assert site.passed == []


def test_without_tls_nodes_need_no_key_but_operators_do(site):
    site.door._keys = site.door._keys._replace(nodes=None)
    assert site.ask(PULL, [], at=INSIDE)[0] == 200
    assert site.ask(LIST, [], at=INSIDE)[0] == 401
