"""Certificates and keys that identify the server and the nodes of a federation."""

import base64
import datetime
import hashlib
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from simfbo.errors import UserError
from simfbo.runs.files import write_atomic

DAYS = 365  # validity of a server certificate
AUTHORITY_DAYS = 5 * 365
WARN_DAYS = 30  # before a certificate expires
LOCAL = ("localhost", "127.0.0.1", "::1")


def make_authority(folder: Path) -> None:
    """Create a certificate authority: `ca.crt` and `ca.key`."""
    folder.mkdir(parents=True, exist_ok=True)
    key = _key()
    write_private(folder / "ca.key", _pem(key))
    _write(folder / "ca.crt", _certificate("simfbo federation", key.public_key(), None, key))


def renew_authority(folder: Path) -> None:
    """Extend the validity of a certificate authority with the same key.

    Owners of the old `ca.crt` continue to trust the server until that one expires.
    """
    _, key = _authority(folder)
    _write(folder / "ca.crt", _certificate("simfbo federation", key.public_key(), None, key))


def make_server_certificate(folder: Path, hosts: Sequence[str]) -> None:
    """Create a server certificate, signed by the folder's authority.

    Args:
        folder: with `ca.crt` and `ca.key`, for `server.crt` and `server.key`.
        hosts: names and addresses by which nodes reach the server; localhost is always added.
    """
    names = [_name(host) for host in dict.fromkeys([*hosts, *LOCAL])]
    root, authority = _authority(folder)
    key = _key()
    server = _certificate("simfbo server", key.public_key(), (root, names), authority)
    write_private(folder / "server.key", _pem(key))
    _write(folder / "server.crt", server)


def names_of(file: Path) -> list[str]:
    """Return the names and addresses in a server certificate."""
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        kind = x509.SubjectAlternativeName
        names = certificate.extensions.get_extension_for_class(kind).value
    except (ValueError, x509.ExtensionNotFound):
        return []
    return [str(name.value) for name in names]


def require_names(hosts: Sequence[str]) -> None:
    """Raise unless all hosts are host names or addresses."""
    for host in hosts:
        _name(host)


def public_key(file: Path) -> ec.EllipticCurvePublicKey | None:
    """Read a public key; None if the file is not one of a node or operator."""
    try:
        key = serialization.load_ssh_public_key(file.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ec.EllipticCurvePublicKey) else None


def node_form(file: Path) -> bytes:
    """Return a public key in the format in which nodes send it; empty if there is none."""
    key = public_key(file)
    if key is None:
        return b""
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return a public key's fingerprint, as printed by `ssh-keygen -l`."""
    text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(text.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def make_key(file: Path) -> None:
    """Create the private key of a node or operator, and the public one next to it (.pub)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    key = _key()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    next_public = file.with_name(
        file.name + ".next.pub"
    )  # both are valid until the old one is removed
    write_atomic(next_public, public + b"\n")
    write_private(file, private)
    os.replace(next_public, file.with_name(file.name + ".pub"))


def make_secret(file: Path) -> None:
    """Create the random secret for authentication between processes on this machine."""
    write_private(file, secrets.token_bytes(32))


def write_private(file: Path, data: bytes) -> None:
    """Replace a file atomically; it is never readable by other users."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(data)
    os.replace(temporary, file)


def days_left(file: Path) -> float:
    """Return the days until a certificate expires; negative if it has expired."""
    return (_expiry(file) - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)


def last_day(file: Path) -> str:
    """Return the day on which a certificate expires."""
    return f"{_expiry(file):%Y-%m-%d}"


def _expiry(file: Path) -> datetime.datetime:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        raise UserError(
            f"{file} is not a certificate: create new ones with 'simfbo flower certs --new'."
        ) from None


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Read the certificate and key of a folder's authority."""
    try:
        root = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
    except (OSError, ValueError, AssertionError):
        raise UserError(
            f"{folder} has no certificate authority: create a new one with "
            "'simfbo flower certs --new'."
        ) from None
    return root, key


def _write(file: Path, certificate: x509.Certificate) -> None:
    write_atomic(file, certificate.public_bytes(serialization.Encoding.PEM))


def _certificate(
    name: str,
    key: ec.EllipticCurvePublicKey,
    issuer: tuple[x509.Certificate, list[x509.GeneralName]] | None,
    authority: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """Build a certificate for a key: the authority's own, or a server's."""
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=AUTHORITY_DAYS if issuer is None else DAYS))
        .add_extension(x509.BasicConstraints(issuer is None, None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(_usage(issuer is None), critical=True)
    )
    if issuer is not None:
        server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
        builder = (
            builder.add_extension(x509.SubjectAlternativeName(issuer[1]), critical=False)
            .add_extension(server, critical=False)
            .add_extension(issuer_key, critical=False)
        )
    return builder.sign(authority, hashes.SHA256())


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _name(host: str) -> x509.GeneralName:
    """Convert a host to its form in a certificate."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.split(".")
    plain = all(re.fullmatch(r"[a-zA-Z0-9-]{1,63}", label) for label in labels)
    if not plain or len(host) > 253:
        raise UserError(f"'{host}' is not a host name or address, such as server.example.org.")
    return x509.DNSName(host)


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
