"""A page on this machine that follows runs while they go: `simfbo watch`.

The server knows two requests: `GET /` for the page and `POST /lines` for what is new. It remembers
nothing between them, so its memory does not grow.
"""

import ipaddress
import json
import socket
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from simfbo.errors import UserError
from simfbo.runs import page
from simfbo.runs.news import find_runs, news

HOST, PORT = "127.0.0.1", 8420
_LONGEST = 1_000_000  # bytes of a request


class Watcher(ThreadingHTTPServer):
    """A server of the live page: a context manager; `serve_forever` runs it.

    Attributes:
        roots: the folders that are watched.
        url: where the page is.
    """

    daemon_threads = True

    def __init__(self, roots: Sequence[Path], host: str = HOST, port: int = PORT) -> None:
        """Take folders, and where to listen.

        Args:
            roots: folders of runs, or folders that have or will have runs below them.
            host: the address; only this machine can reach the default.
            port: of the address; 0 takes a free one.
        """
        find_runs(roots)
        self.roots, self._host = list(roots), host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"Cannot listen on port {port} of {host} ({why}): choose another one."
            ) from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server_port}/"

    def server_bind(self) -> None:
        """Bind without looking up a name for the address, which can take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self._host, self.socket.getsockname()[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of browsers that went away."""

    def accepts(self, host: str, origin: str | None) -> bool:
        """Return whether a request is meant for this server, by its Host and Origin.

        A stranger's page can make a browser send requests here, under a name of its own.
        """
        name = host[: host.rfind("]") + 1] or host.partition(":")[0]
        return self._is_called(name.strip("[]").lower()) and origin in (None, f"http://{host}")

    def _is_called(self, name: str) -> bool:
        """Return whether this server may be called by a name."""
        if name == self._host.lower() or is_local(name):
            return True
        # A server on all addresses may be called by each; but a name can be anybody's.
        own, called = _address(self._host), _address(name)
        return own is not None and own.is_unspecified and called is not None


class _Handler(BaseHTTPRequestHandler):
    """Answers the two requests that there are."""

    server: Watcher  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = 30.0  # seconds without a request, after which a connection is closed
    server_version, sys_version = "simfbo", ""

    def do_GET(self) -> None:
        """Send the page."""
        if self._allowed("/"):
            self._send(200, "text/html; charset=utf-8", page.live().encode())

    def do_POST(self) -> None:
        """Send what a reader has not seen."""
        if not self._allowed("/lines"):
            return
        try:
            seen = self._body()
            answer = json.dumps(news(self.server.roots, seen), allow_nan=False)
        except ValueError as error:  # UserErrors too
            self._refuse(400, str(error))
        else:
            self._send(200, "application/json", answer.encode())

    def _body(self) -> dict[str, Any]:
        """Return the JSON object that was sent."""
        length = int(self.headers.get("Content-Length") or -1)
        if not 0 <= length <= _LONGEST or self.headers.get_content_type() != "application/json":
            self.close_connection = True
            raise ValueError("Send a JSON object of at most 1 MB.")
        try:
            seen = json.loads(self.rfile.read(length))
        except (RecursionError, ValueError):
            seen = None
        if not isinstance(seen, dict):
            raise ValueError("Send a JSON object of at most 1 MB.")
        return seen

    def _allowed(self, path: str) -> bool:
        """Return whether a request may be answered; refuse it otherwise."""
        if not self.server.accepts(self.headers.get("Host", ""), self.headers.get("Origin")):
            self._refuse(403, "This server answers pages of its own only.")
        elif self.path != path:
            self._refuse(404, "There is nothing here.")
        else:
            return True
        return False

    def _refuse(self, code: int, why: str) -> None:
        self.close_connection = True  # there may be a body that nobody reads
        self._send(code, "text/plain; charset=utf-8", why.encode())

    def _send(self, code: int, kind: str, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests: there is one every second."""


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address.

    Example:
        >>> is_local("localhost"), is_local("127.0.0.1"), is_local("0.0.0.0")
        (True, True, False)
    """
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a text is; None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
