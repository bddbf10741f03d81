"""Checks that a SuperLink can be reached and trusted, with advice for failures."""

import socket
import ssl
import urllib.request

from simfbo.errors import UserError
from simfbo.flower.ops.folder import Layout, Setup, local_port


def is_healthy(layout: Layout, setup: Setup) -> bool:
    """Check whether the SuperLink responds."""
    scheme, context = "http", None
    if not setup.insecure:
        scheme = "https"
        context = ssl.create_default_context(cafile=str(layout.certificates / "ca.crt"))
    try:
        url = f"{scheme}://127.0.0.1:{local_port(setup.address)}/health"
        with urllib.request.urlopen(url, timeout=2, context=context) as answer:
            return answer.status == 200
    except OSError:
        return False


def require_superlink(layout: Layout, setup: Setup) -> None:
    """Raise with advice unless the SuperLink to join can be reached and trusted."""
    host, port = setup.address.rpartition(":")[0], local_port(setup.address)
    host = host.strip("[]")
    context = ssl.create_default_context()
    if setup.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(layout.certificates / "ca.crt")
    try:
        with socket.create_connection((host, port), timeout=5) as plain:
            context.wrap_socket(plain, server_hostname=host).close()
        trusted = True
    except ssl.SSLCertVerificationError as error:
        raise UserError(_distrust(layout, setup, host, error)) from None
    except ssl.SSLError:
        trusted = False
    except OSError as error:
        raise UserError(
            f"Cannot connect to {setup.address} ({error}): start the SuperLink there with --host, "
            "and open its port."
        ) from None
    if trusted and setup.insecure:
        raise UserError(f"The SuperLink at {setup.address} uses TLS: omit --insecure.")
    if not trusted and not setup.insecure:
        raise UserError(
            f"The SuperLink at {setup.address} does not use TLS: check the port, or, on its own "
            "machine, join with --insecure if it was started with --insecure."
        )


def _distrust(layout: Layout, setup: Setup, host: str, error: ssl.SSLCertVerificationError) -> str:
    """Return the message for a rejected certificate."""
    if "match" in error.verify_message:
        return (
            f"The SuperLink's certificate is not valid for '{host}': create one on the server with "
            f"'simfbo flower certs --host {host}'."
        )
    if "expired" in error.verify_message:
        return (
            f"The certificate of the SuperLink at {setup.address}, or ca.crt here, has expired: "
            "run 'simfbo flower certs --renew' on the server, and copy ca.crt from there."
        )
    return (
        f"{layout.certificates / 'ca.crt'} did not sign the certificate of the SuperLink at "
        f"{setup.address} ({error.verify_message}): copy ca.crt from the server."
    )
