"""Certificates and keys of a federation: they identify the server and the nodes."""

import datetime
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

DAYS = 365
LOCAL = ("localhost", "127.0.0.1", "::1")


def make_authority(folder: Path) -> None:
    """Create a certificate authority: `ca.crt` and `ca.key`."""
    folder.mkdir(parents=True, exist_ok=True)
    key = _key()
    root = _certificate("simfbo federation", key.public_key(), None, key)
    write_private(folder / "ca.key", _pem(key))
    (folder / "ca.crt").write_bytes(root.public_bytes(serialization.Encoding.PEM))


def make_server_certificate(folder: Path, hosts: Sequence[str]) -> None:
    """Create a server certificate, signed by the folder's authority.

    Args:
        folder: where `ca.crt` and `ca.key` are, and `server.crt` and `server.key` are written.
        hosts: names and addresses by which nodes reach the server; localhost is always added.
    """
    names = [_name(host) for host in dict.fromkeys([*hosts, *LOCAL])]
    try:
        root = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        authority = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        assert isinstance(authority, ec.EllipticCurvePrivateKey)
    except (OSError, ValueError, AssertionError):
        raise UserError(
            f"{folder} has no certificate authority: create a new one with "
            "'simfbo flower certs --new'."
        ) from None
    key = _key()
    server = _certificate("simfbo server", key.public_key(), (root, names), authority)
    write_private(folder / "server.key", _pem(key))
    (folder / "server.crt").write_bytes(server.public_bytes(serialization.Encoding.PEM))


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
    """Raise unless all are host names or addresses."""
    for host in hosts:
        _name(host)


def is_public_key(file: Path) -> bool:
    """Return whether a file holds a public key of the type that nodes use."""
    try:
        key = serialization.load_ssh_public_key(file.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm):
        return False
    return isinstance(key, ec.EllipticCurvePublicKey)


def make_node_key(file: Path) -> None:
    """Create a node's private key, and the public one next to it (.pub)."""
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
    write_private(file, private)
    file.with_name(file.name + ".pub").write_bytes(public + b"\n")


def make_secret(file: Path) -> None:
    """Create the random secret that authenticates processes on this machine to each other."""
    write_private(file, secrets.token_bytes(32))


def write_private(file: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from the moment it exists."""
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(data)


def expired(file: Path) -> bool:
    """Return whether a certificate has expired."""
    try:
        last = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        raise UserError(
            f"{file} is not a certificate: create new ones with 'simfbo flower certs --new'."
        ) from None
    return last < datetime.datetime.now(datetime.UTC)


def _certificate(
    name: str,
    key: ec.EllipticCurvePublicKey,
    issuer: tuple[x509.Certificate, list[x509.GeneralName]] | None,
    authority: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """Return a certificate for a key: the authority's own, or a server's."""
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(issuer is None, None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(_usage(issuer is None), critical=True)
    )
    if issuer is not None:
        server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
        builder = (
            builder.add_extension(x509.SubjectAlternativeName(issuer[1]), critical=False)
            .add_extension(server, critical=False)
            .add_extension(by, critical=False)
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
    """Return a host as it is written in a certificate."""
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
