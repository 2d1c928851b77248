"""Detached ed25519 signatures show who made an artefact; hashes only show that it is complete.

A signature is the 64 bytes of ed25519 over the bytes of `manifest.json`, which holds the hash of every other file. Keys are PEM files, so
that `openssl pkeyutl -verify -rawin` checks a signature without bertopt. Not checked: when something was signed, and whether a key was
revoked. Keep the public key somewhere else than the artefact.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertopt.errors import IntegrityError, UsageError, missing_library

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE = "manifest.json.sig"


def new_key(private: Path) -> Path:
    """Write a new private key, readable only by its owner, and the public key beside it as `<private>.pub`.

    Raises UsageError where either file exists.
    """
    serialization = _library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    made = Ed25519PrivateKey.generate()
    secret = made.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    shown = made.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    public = Path(f"{private}.pub")
    for path in (private, public):
        if os.path.lexists(path):
            raise UsageError(f"key '{path}' exists and is not overwritten; name another file, or leave out --new-key")
    for path, content, mode in ((private, secret, 0o600), (public, shown, 0o644)):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
    return private


def sign(content: bytes, private: Path) -> bytes:
    """Return the signature of a manifest's bytes."""
    return bytes(_private(private).sign(content))


def check(directory: Path, content: bytes, public: Path) -> None:
    """Raise IntegrityError where `directory` holds no signature of `content`, its manifest's bytes, by the key `public`."""
    key = _public(public)
    from cryptography.exceptions import InvalidSignature

    try:
        signature = (directory / SIGNATURE).read_bytes()
    except FileNotFoundError as error:
        raise IntegrityError(
            f"'{directory}' is not signed: it has no {SIGNATURE}; fetch the signed one, or sign it: bertopt sign DIR --key FILE"
        ) from error
    try:
        key.verify(signature, content)
    except InvalidSignature as error:
        raise IntegrityError(
            f"'{directory}' was not signed with the key '{public}', or was changed since; fetch it again, or check the key"
        ) from error


def _private(path: Path) -> Ed25519PrivateKey:
    serialization = _library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        key = serialization.load_pem_private_key(_content(path), password=None)
    except (ValueError, TypeError) as error:  # TypeError: it is encrypted
        raise UsageError(f"'{path}' must be a private ed25519 key in PEM without a password; make one with --new-key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"'{path}' must be a private ed25519 key; got {type(key).__name__}")
    return key


def _public(path: Path) -> Ed25519PublicKey:
    serialization = _library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = serialization.load_pem_public_key(_content(path))
    except ValueError as error:
        raise UsageError(f"'{path}' must be a public ed25519 key in PEM, such as the FILE.pub of --new-key") from error
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"'{path}' must be a public ed25519 key; got {type(key).__name__}")
    return key


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"key '{path}' cannot be read ({error.strerror}); check the path") from error


def _library() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        raise missing_library("signatures need cryptography", "'bertopt[sign]'", failed=error) from error
    return serialization
