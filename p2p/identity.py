"""Who this volunteer is on the network: an Ed25519 key in one file. Runs in: every process.

The peer id is libp2p's: base58 of the identity multihash of the protobuf-encoded public key, so
that the key can be read back out of the id and a signature needs nothing else to be verified.
Importing this source file costs neither trio nor libp2p.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from pathlib import Path
from typing import Final

import base58
from nacl.exceptions import BadSignatureError, CryptoError
from nacl.signing import SigningKey, VerifyKey

from p2p.blobstore import fsync_dir
from p2p.errors import IdentityError

SEED_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
FILE_HEADER: Final = "allmende-identity/1"
MAX_FILE_BYTES: Final = 1024
MAX_PEER_ID_CHARS: Final = 64  # an Ed25519 peer id has 52; base58 decoding is quadratic

# Identity multihash (0x00) of 36 bytes: protobuf key type 1 (Ed25519), 32 bytes of key.
# Source: libp2p specs, peer-ids/peer-ids.md.
_PEER_ID_PREFIX: Final = bytes.fromhex("002408011220")

_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""What the file systems of memory sticks answer: two that create at once are not told apart."""

_log = logging.getLogger("p2p.identity")


class Identity:
    """An Ed25519 key pair and the peer id that belongs to it."""

    __slots__ = ("_signing_key", "peer_id")

    def __init__(self, private_seed: bytes) -> None:
        if len(private_seed) != SEED_BYTES:
            raise IdentityError(f"a private seed has {SEED_BYTES} bytes, not {len(private_seed)}")
        self._signing_key = SigningKey(private_seed)
        self.peer_id: str = _peer_id_of(bytes(self._signing_key.verify_key))
        """The libp2p peer id, base58, starting with 12D3KooW."""

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @property
    def _private_seed(self) -> bytes:
        """The 32 secret bytes; only `p2p.host` and the identity file see them."""
        return bytes(self._signing_key)

    def sign(self, payload: bytes) -> bytes:
        """Sign `payload`.

        Returns:
            The 64-byte Ed25519 signature.
        """
        return self._signing_key.sign(payload).signature


def _peer_id_of(public_key: bytes) -> str:
    return str(base58.b58encode(_PEER_ID_PREFIX + public_key), "ascii")


def _public_key_of(peer_id: str) -> bytes | None:
    """Read the 32-byte public key out of `peer_id`, or None where it is no Ed25519 peer id."""
    if len(peer_id) > MAX_PEER_ID_CHARS:
        return None
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:  # includes UnicodeEncodeError
        return None
    if len(raw) != len(_PEER_ID_PREFIX) + 32 or not raw.startswith(_PEER_ID_PREFIX):
        return None
    # Invariant: one peer has one spelling; base58 alone would let "1" padding and spaces through.
    return raw[len(_PEER_ID_PREFIX) :] if _peer_id_of(raw[-32:]) == peer_id else None


def is_peer_id(text: str) -> bool:
    """Tell whether `text` is the one spelling of an Ed25519 libp2p peer id. Never raises."""
    return _public_key_of(text) is not None


def verify_signature(peer_id: str, payload: bytes, signature: bytes) -> bool:
    """Tell whether `signature` is the one of `peer_id` over `payload`. Never raises."""
    public_key = _public_key_of(peer_id)
    if public_key is None or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        VerifyKey(public_key).verify(payload, signature)
    except (BadSignatureError, CryptoError, ValueError, TypeError):
        return False
    return True


def load_or_create_identity(file: Path) -> Identity:
    """Read the identity in `file`, making a new one where there is none.

    Two processes that create at once end with one key: the file appears complete by a hard link,
    which fails for the second one, and that one reads what the first wrote. A kill at any point
    leaves either no file or the whole of it.

    Raises:
        IdentityError: The file is malformed, unreadable, or cannot be created.
    """
    try:
        if not file.exists():
            _create_file(file, secrets.token_bytes(SEED_BYTES))
        return _read_file(file)
    except OSError as error:
        raise IdentityError(
            f"cannot use the identity file {file}: {error.strerror or error}",
            hint=f"Check that {file.parent} is a folder of yours that can be written.",
        ) from error


def copy_identity(source_file: Path, file: Path) -> Identity:
    """Write the identity of `source_file`, and nothing else that is in there, to a new file.

    The copy is for its owner alone; `source_file` stays as it is. A kill leaves the whole or none.

    Raises:
        IdentityError: There is a file already, or `source_file` holds none, or one of the two
            cannot be used.
    """
    if file.is_dir():
        raise IdentityError(f"{file} is a folder", hint="Name a file in it.")
    identity = _read_source(source_file)
    try:
        is_first = _create_file(file, identity._private_seed)
    except OSError as error:
        raise IdentityError(f"cannot write {file}: {error.strerror or error}") from error
    if not is_first:
        raise IdentityError(f"{file} exists, and stays as it is", hint="Name another file.")
    return identity


def _read_source(file: Path) -> Identity:
    try:
        return _parse_file(file)
    except OSError as error:
        raise IdentityError(f"cannot read {file}: {error.strerror or error}") from error


def _create_file(file: Path, private_seed: bytes) -> bool:
    """Write under a temporary name, then link that to `file`; False if somebody was first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temp_file = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        _write_file(temp_file, private_seed)
        try:
            os.link(temp_file, file)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if file.exists():
                return False
            temp_file.replace(file)
    finally:
        temp_file.unlink(missing_ok=True)
    fsync_dir(file.parent)
    return True


def _write_file(file: Path, private_seed: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(f"{FILE_HEADER}\n{private_seed.hex()}\n")
        stream.flush()
        os.fsync(stream.fileno())


def _read_file(file: Path) -> Identity:
    mode = file.stat().st_mode
    if os.name != "nt" and mode & 0o077:
        _log.warning("the identity file could be read by others; closing it file=%s", file)
        file.chmod(0o600)
    try:
        return _parse_file(file)
    except IdentityError as error:
        raise IdentityError(
            str(error),
            hint=f"Put back a copy of it, or delete {file} to get a new identity"
            " (the old one's credit stays with the old key).",
        ) from error


def _parse_file(file: Path) -> Identity:
    if not file.is_file() and file.exists():  # a pipe could be waited for without an end
        raise IdentityError(f"{file} is no file that could hold an identity")
    with file.open("rb") as stream:
        content = stream.read(MAX_FILE_BYTES + 1)
    lines = content.decode("ascii", errors="replace").split()
    try:
        if len(lines) != 2 or lines[0] != FILE_HEADER:
            raise ValueError("header")
        return Identity(bytes.fromhex(lines[1]))
    except (ValueError, IdentityError) as error:
        raise IdentityError(f"the identity file {file} is damaged or of another version") from error
