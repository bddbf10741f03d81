"""Operators, who may start, stop and watch runs, and their signed requests.

The public keys are in a federation's folder `operators`. The SuperLink reads them for every
request, so a revoked operator's requests are rejected immediately.
"""

import base64
import getpass
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from simfbo.errors import UserError, plain
from simfbo.flower.ops import certificates
from simfbo.runs.files import Json

HEADER = "simfbo-operator"
KEY = "SIMFBO_OPERATOR_KEY"  # an environment variable: the path of a private key
LASTS = 60.0  # validity of a signature in seconds, before and after the server's time
_ALGORITHM = ec.ECDSA(hashes.SHA256())

Reserve = Callable[[str, str, float], bool]  # (purpose, nonce, expiry) -> whether it is new


class Claim(NamedTuple):
    """The contents of a valid signature: the signer's key file, and the content's SHA-256."""

    file: Path
    digest: str

    @property
    def name(self) -> str:
        """The operator's name."""
        return self.file.stem

    @property
    def stands(self) -> bool:
        """Whether the operator has not been revoked since."""
        return self.file.exists()


def sign(key: Path, method: str, path: str, body: bytes) -> str:
    """Sign a request with an operator's private key; return the header.

    The signature covers method, path, content, time and a random number, so it is valid for this
    request only, and only once.
    """
    private = serialization.load_ssh_private_key(key.read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    words = [certificates.fingerprint(private.public_key()), f"{time.time():.3f}"]
    words += [secrets.token_hex(16), hashlib.sha256(body).hexdigest()]
    signature = private.sign(_text(method, path, words), _ALGORITHM)
    return " ".join([*words, base64.b64encode(signature).decode()])


def verify(folder: Path, header: str, method: str, path: str, reserve: Reserve) -> Claim:
    """Verify a request's signature; raise `ValueError` if it is invalid.

    Args:
        folder: of the operators' public keys.
        header: from `sign`.
        method: of the request.
        path: of the request.
        reserve: records a random number until a time; False if it is already recorded.
    """
    *words, signature = header.split(" ")
    if len(words) != 4:
        raise ValueError("the request is not signed by an operator")
    keys = {certificates.fingerprint(key): (file, key) for file, key in _read(folder).items()}
    if words[0] not in keys:
        raise ValueError("the request is signed by a key that is not an operator's")
    (file, key), signed_at = keys[words[0]], float(words[1])
    if not abs(time.time() - signed_at) < LASTS:
        raise ValueError("the signature has expired")
    try:
        key.verify(base64.b64decode(signature), _text(method, path, words), _ALGORITHM)
    except InvalidSignature:
        raise ValueError("the signature is not valid") from None
    if not reserve("simfbo operator", words[0] + words[2], signed_at + 2 * LASTS):
        raise ValueError("the request was sent before")
    return Claim(file, words[3])


def create_first(folder: Path) -> list[str]:
    """Create an operator named like this user if there is none; return created names."""
    if _read(folder):
        return []
    certificates.make_key(folder / _user())
    return [f"operator {_user()}"]


def add(folder: Path, name_or_key: str) -> str:
    """Add an operator by a name, with a new key, or by a public key; return the name."""
    key_file = Path(name_or_key)
    if key_file.suffix != ".pub":
        _require_new(folder, name_or_key)
        certificates.make_key(folder / name_or_key)
        return name_or_key
    _require_new(folder, key_file.stem)
    if certificates.public_key(key_file) is None:
        raise UserError(
            f"{key_file} is not a public key: give a file such as anna.pub, created with "
            "'ssh-keygen -t ecdsa -b 384', or a name, for which a key is created."
        )
    folder.mkdir(exist_ok=True)
    shutil.copy(key_file, folder / key_file.name)
    return key_file.stem


def revoke(folder: Path, name: str) -> None:
    """Remove an operator, and the private key if it is in the folder."""
    if folder / f"{name}.pub" not in _read(folder):
        raise UserError(
            f"There is no operator '{plain(name)}': see 'simfbo flower operators list'."
        )
    (folder / f"{name}.pub").unlink()
    (folder / name).unlink(missing_ok=True)


def listed(folder: Path) -> list[Json]:
    """Return the operators with their fingerprints and the location of the private key."""
    return [
        {
            "operator": file.stem,
            "fingerprint": certificates.fingerprint(key),
            "private key": "here" if file.with_suffix("").exists() else "elsewhere",
        }
        for file, key in _read(folder).items()
    ]


def own_key(folder: Path) -> Path:
    """Return the private key for signing: the environment's, this user's, or the first here."""
    if KEY in os.environ:
        file = Path(os.environ[KEY])
        if not file.is_file():
            raise UserError(f"{KEY} names {file}, which is not a file.")
        return file
    keys = [file.with_suffix("") for file in _read(folder)]
    keys = [key for key in keys if key.is_file()]
    if not keys:
        raise UserError(
            f"No operator's private key is in {folder}: create one with 'simfbo flower operators "
            f"add NAME', or name yours in the environment variable {KEY}."
        )
    return min(keys, key=lambda key: key.name != _user())


def _user() -> str:
    """Return an operator's name for the current user."""
    try:
        return re.sub(r"[^a-zA-Z0-9_-]+", "-", getpass.getuser()).strip("-")[:64] or "operator"
    except (KeyError, OSError, ImportError):
        return "operator"


def _require_new(folder: Path, name: str) -> None:
    """Raise unless a name is valid and new."""
    if not re.fullmatch(r"[\w-]{1,64}", name, re.ASCII):
        raise UserError(f"'{plain(name)}' is not a name: use letters, digits, - and _.")
    if (folder / f"{name}.pub").exists():
        raise UserError(f"There is an operator '{name}' already: revoke it first.")


def _read(folder: Path) -> dict[Path, ec.EllipticCurvePublicKey]:
    """Return the public keys of all operators, by file."""
    keys = {file: certificates.public_key(file) for file in sorted(folder.glob("*.pub"))}
    return {file: key for file, key in keys.items() if key is not None}


def _text(method: str, path: str, words: list[str]) -> bytes:
    """Return the signed text."""
    return "\n".join(["simfbo operator's request", method, path, *words]).encode()
