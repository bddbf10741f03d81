"""Limits on unauthenticated connections from other machines.

An unauthenticated client can open connections without sending anything, or send invalid requests as
fast as the network allows. Each address therefore has a limited number of connections per few
seconds until one of its requests is signed by a known key, and an unauthenticated connection is
closed after these seconds.
"""

import contextlib
import ipaddress
import socket
import time
from typing import Any, NamedTuple

SECONDS = 10.0  # to authenticate
PER_ADDRESS = 100  # connections in as many seconds
TOTAL = 400  # open connections

Address = tuple[str, int]


class _Guest(NamedTuple):
    """An unauthenticated connection, and the time at which it was opened."""

    connection: socket.socket
    since: float


class Guests(socket.socket):
    """A listening socket with a limited number of unauthenticated connections."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on an address."""
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind((host, port))
        self._guests: dict[Address, _Guest] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next admissible connection; others are closed immediately."""
        while True:
            connection, address = super().accept()
            if self.admit(connection, address[:2]):
                return connection, address
            connection.close()

    def admit(self, connection: socket.socket, address: Address) -> bool:
        """Admit or reject a new connection; close the oldest one if there are too many."""
        if ipaddress.ip_address(address[0]).is_loopback:
            return True
        self.sweep()
        if sum(host == address[0] for host, _ in self._guests) >= PER_ADDRESS:
            return False
        if len(self._guests) >= TOTAL:
            _cut_off(self._guests.pop(next(iter(self._guests))).connection)
        self._guests[address] = _Guest(connection, time.monotonic())
        return True

    def welcome(self, address: Address) -> None:
        """Remove the limits of a connection: one of its requests was signed by a known key."""
        self._guests.pop(address, None)

    def sweep(self) -> None:
        """Close connections that have not been authenticated in time."""
        latest = time.monotonic() - SECONDS
        for address in [a for a, guest in self._guests.items() if guest.since < latest]:
            _cut_off(self._guests.pop(address).connection)


def _cut_off(connection: socket.socket) -> None:
    """Shut a connection down; its server notices and closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
