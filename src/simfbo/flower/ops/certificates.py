"""Certificates and keys of a federation: who the server is, and which nodes may join."""

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
    """Write a new certificate authority: `ca.crt` and `ca.key`."""
    folder.mkdir(parents=True, exist_ok=True)
    key = _key()
    root = _certificate("simfbo federation", key.public_key(), None, key)
    write_private(folder / "ca.key", _pem(key))
    (folder / "ca.crt").write_bytes(root.public_bytes(serialization.Encoding.PEM))


def make_server_certificate(folder: Path, hosts: Sequence[str]) -> None:
    """Write a server certificate that the folder's authority has signed.

    Args:
        folder: where `ca.crt` and `ca.key` are, and `server.crt` and `server.key` go.
        hosts: names and addresses under which clients reach the server; this machine's own names
            are always among them.
    """
    names = [_name(host) for host in dict.fromkeys([*hosts, *LOCAL])]
    try:
        root = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        authority = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        assert isinstance(authority, ec.EllipticCurvePrivateKey)
    except (OSError, ValueError, AssertionError):
        raise UserError(f"{folder} has no authority to sign with: begin anew with --new.") from None
    key = _key()
    server = _certificate("simfbo server", key.public_key(), (root, names), authority)
    write_private(folder / "server.key", _pem(key))
    (folder / "server.crt").write_bytes(server.public_bytes(serialization.Encoding.PEM))


def names_of(file: Path) -> list[str]:
    """Return the names and addresses that a server certificate is for."""
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        kind = x509.SubjectAlternativeName
        names = certificate.extensions.get_extension_for_class(kind).value
    except (ValueError, x509.ExtensionNotFound):
        return []
    return [str(name.value) for name in names]


def require_names(hosts: Sequence[str]) -> None:
    """Raise unless all are names or addresses of hosts."""
    for host in hosts:
        _name(host)


def is_public_key(file: Path) -> bool:
    """Return whether a file holds a public key of the kind that nodes have."""
    try:
        key = serialization.load_ssh_public_key(file.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm):
        return False
    return isinstance(key, ec.EllipticCurvePublicKey)


def make_node_key(file: Path) -> None:
    """Write a node's private key, and beside it (.pub) the public one."""
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
    """Write a random secret, by which the server knows its own helper processes."""
    write_private(file, secrets.token_bytes(32))


def write_private(file: Path, data: bytes) -> None:
    """Write a file that nobody but its owner can read, ever."""
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(data)


def expired(file: Path) -> bool:
    """Return whether a certificate's time is over."""
    try:
        last = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        raise UserError(
            f"{file} is no certificate: make new ones with 'simfbo flower certs'."
        ) from None
    return last < datetime.datetime.now(datetime.UTC)


def _certificate(
    name: str,
    key: ec.EllipticCurvePublicKey,
    issuer: tuple[x509.Certificate, list[x509.GeneralName]] | None,
    authority: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """Return a certificate for a key: of the authority itself, or of a server it vouches for."""
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
    """Return a host as it stands in a certificate."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.split(".")
    plain = all(re.fullmatch(r"[a-zA-Z0-9-]{1,63}", label) for label in labels)
    if not plain or len(host) > 253:
        raise UserError(f"'{host}' is no host name or address, such as server.example.org.")
    return x509.DNSName(host)


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
