"""The errors that leave `p2p`, as one tree. Runs in: agent; the pure parts in every process.

P2PError
 +- IdentityError            the identity file cannot be read, made or used
 +- AddressError             an address that nobody could listen on or dial
 +- ListenError              no address could be listened on
 +- UnsupportedLibp2pError   the guards were written for another libp2p
 +- FramingError             bytes that are no frame of the protocol
 |   +- StreamEndedError     the stream ended inside a frame
 +- MessageTooLargeError     more bytes than the protocol or the topic allows
 +- PeerUnreachableError     no connection, or it broke
 +- RequestTimeoutError      the deadline passed first
 +- RequestRefusedError      the peer answered that it will not
 +- BlobUnavailableError     nobody delivered the blob
 +- BlobCorruptError         bytes that do not belong to the blob
 +- BlobStoreFullError       no room on the disk
"""

from __future__ import annotations


class P2PError(Exception):
    """Something in the network layer failed."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        """What the user can do, as one sentence; empty where there is nothing to do."""


class IdentityError(P2PError):
    """The identity file cannot be read, made or used."""


class AddressError(P2PError):
    """The address is none that can be listened on or dialled."""


class ListenError(P2PError):
    """No address could be listened on."""


class UnsupportedLibp2pError(P2PError):
    """The installed libp2p is not the version that the guards were written for."""


class FramingError(P2PError):
    """The bytes are no frame of the protocol."""


class StreamEndedError(FramingError):
    """The stream ended inside a frame, as that of a killed sender does."""


class MessageTooLargeError(P2PError):
    """The payload is larger than the protocol or the topic allows."""


class PeerUnreachableError(P2PError):
    """There is no connection to the peer, or it broke."""


class RequestTimeoutError(P2PError):
    """The peer did not answer before the deadline."""


class RequestRefusedError(P2PError):
    """The peer answered, and refused."""


class BlobNotServedError(RequestRefusedError):
    """The peer does not have the blob, or does not give it."""


class BlobUnavailableError(P2PError):
    """Nobody delivered the blob."""


class BlobCorruptError(P2PError):
    """The bytes do not belong to the blob."""


class BlobStoreFullError(P2PError):
    """There is no room for the blob on the disk."""


def first_own_error(error: BaseException | None) -> BaseException:
    """Find the P2PError among what the nested nurseries wrapped."""
    if isinstance(error, BaseExceptionGroup):
        found = [first_own_error(inner) for inner in error.exceptions]
        return next((one for one in found if isinstance(one, P2PError)), error)
    return error or RuntimeError("the host ended without an error")
