"""A stranger at the door: who can reach the SuperLink and has ca.crt, but no key.

Requests are those of Flower's own clients: protobuf over HTTPS. An attack returns what it got, or
None if it was refused.
"""

import base64
import datetime
import hashlib
import socket
import ssl
import threading
import time
from collections import Counter

import httpx
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto import control_pb2 as control
from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, node_pb2, runtime_pb2

PROTOBUF = "application/protobuf"
DISGUISES = [  # of one who is not on the server's machine
    {},
    {"x-forwarded-for": "127.0.0.1", "x-real-ip": "127.0.0.1", "forwarded": "for=127.0.0.1"},
    {"host": "127.0.0.1"},
    {"authorization": "Bearer x", "simfbo-operator": "root 1 2 3 4"},
]


class Stranger:
    """Sends requests to one address, trusting one authority."""

    def __init__(self, address, authority):
        self.address, self.context = address, ssl.create_default_context(cafile=str(authority))
        self.key, self.answers = ec.generate_private_key(ec.SECP384R1()), Counter()

    def post(self, path, body, headers=None, address=None):
        """Return the content of a response; None unless it is a success."""
        url = f"https://{address or self.address}{path}"
        given = {"content-type": PROTOBUF, "accept": PROTOBUF, **(headers or {})}
        for _ in range(60):  # until there is an answer: connections are limited, too
            with httpx.Client(verify=self.context, timeout=20) as client:
                try:
                    with client.stream("POST", url, content=body, headers=given) as response:
                        self.answers[str(response.status_code)] += 1
                        found = next(response.iter_raw(), b"")  # a log goes on and on
                        return found if response.status_code == 200 else None
                except httpx.HTTPError:
                    time.sleep(0.5)
        self.answers["none"] += 1
        return None

    def ask(self, name, request):
        """Return the answer to an operator's request, in any disguise and spelling."""
        body, path = request.SerializeToString(), f"/v1/control/{name}"
        spellings = [path, f"/{path}", path.replace("control", "%63ontrol"), f"{path}/"]
        for headers in DISGUISES:
            for spelling in spellings:
                found = self.post(spelling, body, headers)
                if found is not None:
                    return found
        return None

    def signed(self, public, private):
        """Return the headers of a node with a public key, signed by a private one."""
        now = datetime.datetime.now(datetime.UTC).isoformat()
        proof = private.sign(now.encode(), ec.ECDSA(hashes.SHA256()))
        names = "flwr-public-key", "flwr-timestamp", "flwr-signature"
        texts = base64.b64encode(pem(public)), now, base64.b64encode(proof)
        return dict(zip(names, texts, strict=True))


def pem(public):
    return public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def submit(stranger, app):
    digest = hashlib.sha256(app).hexdigest()
    fab = fab_pb2.Fab(hash_str=digest, content=app)
    return stranger.ask("start-run", control.StartRunRequest(fab=fab))


def list_runs(stranger):
    return stranger.ask("list-runs", control.ListRunsRequest())


def list_nodes(stranger):
    return stranger.ask("list-nodes", control.ListNodesRequest())


def read_log(stranger, run):
    return stranger.ask("stream-logs", control.StreamLogsRequest(run_id=run))


def register(stranger):
    public = pem(ec.generate_private_key(ec.SECP384R1()).public_key())
    return stranger.ask("register-node", control.RegisterNodeRequest(public_key=public))


def stop(stranger, run):
    return stranger.ask("stop-run", control.StopRunRequest(run_id=run))


def join(stranger, public=None):
    """Join with a key of one's own, or under the public key of another."""
    public = public or stranger.key.public_key()
    request = fleet_pb2.ActivateNodeRequest(public_key=pem(public), heartbeat_interval=30)
    body = request.SerializeToString()
    return stranger.post("/v1/fleet/activate-node", body, stranger.signed(public, stranger.key))


def replay(stranger, captured, local):
    """Send a request that was captured, from outside and, as if that were possible, from within."""
    path, headers, body = captured
    tries = [stranger.post(path, body, headers, address) for address in (None, local)]
    return next((found for found in tries if found is not None), None)


def node_request(stranger, private, node):
    """Return a request of a node, its sign of life, as it goes over the network."""
    about = {"node": node_pb2.Node(node_id=node), "heartbeat_interval": 30}
    body = heartbeat_pb2.SendNodeHeartbeatRequest(**about).SerializeToString()
    return "/v1/fleet/send-node-heartbeat", stranger.signed(private.public_key(), private), body


def serve(stranger, run):
    """Act as the server of a run: take tasks, talk to nodes, read and write objects."""
    token = {"flwr-task-token": "0" * 64}
    requests = {
        "acquire-task": runtime_pb2.AcquireTaskRequest(supported_task_types=["flwr-serverapp"]),
        "get-nodes": runtime_pb2.GetNodesRequest(),
        "pull-messages": runtime_pb2.PullAppMessagesRequest(),
        "push-messages": runtime_pb2.PushAppMessagesRequest(),
        "pull-object": message_pb2.PullObjectRequest(run_id=run, object_id="0" * 64),
        "push-object": message_pb2.PushObjectRequest(run_id=run, object_content=b"x"),
    }
    for name, request in requests.items():
        for api in ("runtime", "fleet"):
            for headers in ({}, token):
                found = stranger.post(f"/v1/{api}/{name}", request.SerializeToString(), headers)
                if found is not None:
                    return found
    return None


class Flood:
    """Large contents, endless headers and silent connections, for some seconds.

    Attributes:
        sent: bytes that the SuperLink took.
        silent: connections that it kept open at the end.
    """

    def __init__(self, stranger, seconds, size, connections):
        self.sent, self.silent = 0, 0
        self._stranger, self._size, self._end = stranger, size, time.monotonic() + seconds
        jobs = [self._contents] * 6 + [self._headers] * 2
        self._jobs = [threading.Thread(target=job, daemon=True) for job in jobs]
        self._jobs.append(threading.Thread(target=self._wait, args=[connections], daemon=True))
        for job in self._jobs:
            job.start()

    def join(self):
        """Wait for its end."""
        for job in self._jobs:
            job.join(timeout=120)

    def _contents(self):
        head = (f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Type: {PROTOBUF}\r\n"
                f"Content-Length: {self._size}\r\n\r\n")  # fmt: skip
        self._pour(head.encode(), bytes(2**16), self._size)

    def _headers(self):
        self._pour(
            b"GET /health HTTP/1.1\r\nHost: x\r\n", b"x: " + b"y" * 60_000 + b"\r\n", self._size
        )

    def _pour(self, head, part, size):
        """Send a request's beginning and then more and more; begin anew when it is refused."""
        while time.monotonic() < self._end:
            try:
                with self._connection() as stream:
                    stream.sendall(head)
                    left = size
                    while left > 0 and time.monotonic() < self._end:
                        stream.sendall(part)
                        left -= len(part)
                        self.sent += len(part)
                    stream.recv(1)
            except OSError:
                time.sleep(0.01)

    def _wait(self, connections):
        host, port = self._stranger.address.split(":")
        kept = []
        while time.monotonic() < self._end:
            if len(kept) >= connections:
                time.sleep(0.1)
                continue
            try:
                kept.append(socket.create_connection((host, int(port)), timeout=2))
            except OSError:
                time.sleep(0.05)
        self.silent = sum(map(_is_open, kept))
        for one in kept:
            one.close()

    def _connection(self):
        host, port = self._stranger.address.split(":")
        plain = socket.create_connection((host, int(port)), timeout=5)
        return self._stranger.context.wrap_socket(plain, server_hostname=host)


def _is_open(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
