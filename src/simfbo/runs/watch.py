"""A local server of the live page: `simfbo watch`.

It has two requests: `GET /` for the page and `POST /lines` for new lines of histories. The server
is stateless, so that its memory does not grow.
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
_MAX_REQUEST = 1_000_000  # bytes


class Watcher(ThreadingHTTPServer):
    """A server of the live page: a context manager; `serve_forever` runs it.

    Attributes:
        roots: the folders that are searched for runs.
        url: of the page.
    """

    daemon_threads = True

    def __init__(self, roots: Sequence[Path], host: str = HOST, port: int = PORT) -> None:
        """Create a server.

        Args:
            roots: folders of runs, or folders that have or will have runs below them.
            host: the address; the default accepts connections of this machine only.
            port: of the address; 0 for a free one.
        """
        find_runs(roots)
        self.roots, self._host = list(roots), host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"Cannot listen on port {port} of {host} ({reason}): choose another one."
            ) from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server_port}/"

    def server_bind(self) -> None:
        """Bind without a reverse lookup of the address, which can take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self._host, self.socket.getsockname()[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do not log closed connections."""

    def accepts(self, host: str, origin: str | None) -> bool:
        """Validate the Host and Origin of a request.

        This rejects requests that other pages send through a browser (DNS rebinding, CSRF).
        """
        name = host[: host.rfind("]") + 1] or host.partition(":")[0]
        return self._accepts_host(name.strip("[]").lower()) and origin in (None, f"http://{host}")

    def _accepts_host(self, name: str) -> bool:
        if name == self._host.lower() or is_local(name):
            return True
        # A server on all addresses accepts each address, but no names, which may resolve to it.
        own, requested = _address(self._host), _address(name)
        return own is not None and own.is_unspecified and requested is not None


class _Handler(BaseHTTPRequestHandler):
    """Handles the two requests."""

    server: Watcher  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = 30.0  # seconds until an idle connection is closed
    server_version, sys_version = "simfbo", ""

    def do_GET(self) -> None:
        """Send the page."""
        if self._allowed("/"):
            self._send(200, "text/html; charset=utf-8", page.live().encode())

    def do_POST(self) -> None:
        """Send the lines after the reader's position."""
        if not self._allowed("/lines"):
            return
        try:
            seen = self._body()
            response = json.dumps(news(self.server.roots, seen), allow_nan=False)
        except ValueError as error:  # includes UserError
            self._reject(400, str(error))
        else:
            self._send(200, "application/json", response.encode())

    def _body(self) -> dict[str, Any]:
        """Read and validate the JSON object in a request."""
        length = int(self.headers.get("Content-Length") or -1)
        is_json = self.headers.get_content_type() == "application/json"
        if not (0 <= length <= _MAX_REQUEST and is_json):
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
        """Validate a request; reject it if it is invalid."""
        if not self.server.accepts(self.headers.get("Host", ""), self.headers.get("Origin")):
            self._reject(403, "Requests of other pages are rejected.")
        elif self.path != path:
            self._reject(404, "Not found.")
        else:
            return True
        return False

    def _reject(self, code: int, reason: str) -> None:
        self.close_connection = True  # its body may be unread
        self._send(code, "text/plain; charset=utf-8", reason.encode())

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
        """Do not log requests: there is one every second."""


def is_local(host: str) -> bool:
    """Check if an address can only be reached from this machine.

    Example:
        >>> is_local("localhost"), is_local("127.0.0.1"), is_local("0.0.0.0")
        (True, True, False)
    """
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an address; return None for a host name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
