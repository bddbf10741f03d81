"""What strangers can hold of a SuperLink, how it takes a new certificate, and who it knows."""

import hashlib
import itertools
import socket
import ssl
import threading
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from simfbo.flower.ops import certificates, credentials, fast_nodes, guests, superlink
from simfbo.flower.ops.folder import Layout


class Listener(guests.Guests):
    """A listening socket, and all connections that it was offered."""

    def __init__(self):
        super().__init__("127.0.0.1", 0)
        self.pairs = []

    def arrive(self, host, port):
        """Return whether a new connection may stay."""
        self.pairs.append(socket.socketpair())
        return self.admit(self.pairs[-1][0], (host, port))


@pytest.fixture
def listener():
    with Listener() as found:
        yield found
        for end in itertools.chain(*found.pairs):
            end.close()


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(guests.time, "monotonic", lambda: now[0])
    return now


def is_cut_off(pair):
    pair[1].settimeout(0.2)
    try:
        return pair[1].recv(1) == b""
    except TimeoutError:
        return False


def test_an_address_has_few_connections_until_it_shows_a_key(listener, clock):
    stays = [listener.arrive("192.0.2.1", port) for port in range(guests.PER_ADDRESS + 2)]
    assert stays == [True] * guests.PER_ADDRESS + [False] * 2
    assert listener.arrive("192.0.2.2", 1)  # others are not affected
    listener.welcome(("192.0.2.1", 0))
    assert listener.arrive("192.0.2.1", 5000)
    assert not listener.arrive("192.0.2.1", 5001)
    clock[0] += guests.SECONDS + 1
    listener.sweep()
    assert not is_cut_off(listener.pairs[0])  # it has shown a key
    assert is_cut_off(listener.pairs[1])
    assert listener.arrive("192.0.2.1", 5001)


def test_all_strangers_together_have_few_connections(listener, clock, monkeypatch):
    monkeypatch.setattr(guests, "TOTAL", 3)
    assert all(listener.arrive(f"192.0.2.{k}", 1) for k in range(5))
    assert [is_cut_off(pair) for pair in listener.pairs] == [True, True, False, False, False]


def test_this_machine_is_no_stranger(listener):
    listener.listen()
    with socket.create_connection(listener.getsockname()):
        listener.accept()[0].close()
    assert all(listener.arrive("127.0.0.1", k) for k in range(2 * guests.PER_ADDRESS))


def test_a_renewed_certificate_is_used_at_once(tmp_path):
    certificates.make_authority(tmp_path)
    certificates.make_server_certificate(tmp_path, ["server.example.org"])
    files = tmp_path / "server.crt", tmp_path / "server.key"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    certificate = superlink.Certificate(SimpleNamespace(ssl=context), *files)
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))

    def serial():
        here, there = socket.socketpair()
        job = threading.Thread(target=lambda: context.wrap_socket(there, server_side=True).close())
        job.start()
        with client.wrap_socket(here, server_hostname="server.example.org") as stream:
            job.join()
            return x509.load_der_x509_certificate(stream.getpeercert(True)).serial_number

    first = serial()
    certificate.refresh()
    assert serial() == first
    key = files[1].read_bytes()
    certificates.make_server_certificate(tmp_path, ["server.example.org"])
    new = files[1].read_bytes()
    files[1].write_bytes(key)  # half of it is there
    certificate.refresh()
    assert serial() == first
    files[1].write_bytes(new)
    certificate.refresh()
    assert serial() not in (first, 0)


def test_a_node_remains_the_same_after_its_key_was_replaced(tmp_path):
    layout = Layout(tmp_path / "federation")
    for number in range(3):
        folder = tmp_path / str(number)
        certificates.make_key(folder / "a.b")
        credentials.admit(layout.folder, folder / "a.b.pub")
    forms = [certificates.node_form(tmp_path / str(k) / "a.b.pub") for k in range(3)]
    names = {file.name for file in layout.keys.iterdir()}
    assert names == {"a.b.pub", "a.b.old.pub", "a.b.first"}
    kept = layout.public_keys()
    assert [file.name for file in kept] == ["a.b.pub"]
    assert certificates.node_form(layout.identity(kept[0])) == forms[0]
    state = SimpleNamespace(get_node_id_by_public_key={forms[0]: 7}.get)
    superlink.know_renewed_nodes(layout, state)
    assert [state.get_node_id_by_public_key(form) for form in forms] == [7, 7, 7]
    assert state.get_node_id_by_public_key(b"other") is None


def test_a_node_replies_in_its_own_name_only():
    push = superlink.require_own_name(lambda request, state: state)

    def request(*senders):
        replies = [SimpleNamespace(metadata=SimpleNamespace(src_node_id=k)) for k in senders]
        return SimpleNamespace(node=SimpleNamespace(node_id=7), messages_list=replies)

    assert push(request=request(7), state="pushed") == push(request=request(), state="pushed")
    for senders in ((8,), (7, 8)):
        with pytest.raises(superlink.FlowerError):
            push(request=request(*senders), state="pushed")


def test_a_running_node_signs_with_the_key_that_its_file_holds_now(tmp_path):
    file, used = tmp_path / "node-1", []
    certificates.make_key(file)
    signer = fast_nodes.CurrentKey(file)

    def intercept():
        request = SimpleNamespace(headers={})
        signer.intercept(SimpleNamespace(request=request), lambda context: None)
        used.append(request.headers["flwr-public-key"])

    for _ in range(2):
        intercept()
    certificates.make_key(file)
    intercept()
    assert used[0] == used[1] != used[2]


def test_a_node_runs_listed_apps_only(monkeypatch):
    """In place of Flower's procedure: one that asks for the app and then runs it."""
    apps, inserted = {"good": b"good", "evil": b"evil"}, []
    message = SimpleNamespace(metadata=SimpleNamespace(run_id=5))

    def pull(*, receive, get_fab, **rest):
        receive()
        return get_fab(app, 5).content

    module = fast_nodes.start_client_internal
    monkeypatch.setattr(module, "_pull_and_store_message", pull)
    monkeypatch.setattr(module, "_insert_message", lambda *given: inserted.append(given[0]))
    monkeypatch.setattr(fast_nodes, "Message", lambda error, reply_to: (error, reply_to))
    digest = hashlib.sha256(b"good").hexdigest()
    fast_nodes.only_apps({digest})
    parts = {"state": None, "object_store": None, "receive": lambda: (message, None)}
    parts["get_fab"] = lambda name, run: SimpleNamespace(hash_str=digest, content=apps[name])
    app = "good"
    assert module._pull_and_store_message(**parts) == b"good"
    app = "evil"  # the SuperLink says that it has the other's digest
    assert module._pull_and_store_message(**parts) == 5
    ((error, answered),) = inserted
    assert answered is message
    assert (error.code, "not on the node's list" in error.reason) == (7, True)


def test_keys_are_as_openssh_knows_them(tmp_path):
    certificates.make_key(tmp_path / "anna")
    key = load_ssh_private_key((tmp_path / "anna").read_bytes(), None)
    found = certificates.fingerprint(key.public_key())
    assert found == certificates.fingerprint(certificates.public_key(tmp_path / "anna.pub"))
    assert found.startswith("SHA256:")
    assert len(found) == 50
