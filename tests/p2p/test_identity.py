"""The identity file and signatures."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.errors import IdentityError
from p2p.identity import Identity, is_peer_id, load_or_create_identity, verify_signature

# RFC 8032, section 7.1, test 2: secret key, message, signature.
RFC_SEED = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
RFC_SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def test_signs_as_rfc_8032_says() -> None:
    identity = Identity(RFC_SEED)
    assert identity.sign(b"\x72") == RFC_SIGNATURE
    assert verify_signature(identity.peer_id, b"\x72", RFC_SIGNATURE)
    assert not verify_signature(identity.peer_id, b"\x73", RFC_SIGNATURE)
    assert not verify_signature(Identity(bytes(32)).peer_id, b"\x72", RFC_SIGNATURE)


def test_the_peer_id_is_libp2ps() -> None:
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID

    assert Identity(RFC_SEED).peer_id == str(
        ID.from_pubkey(create_new_key_pair(RFC_SEED).public_key)
    )
    assert Identity(RFC_SEED).peer_id.startswith("12D3KooW")


def test_one_peer_has_one_spelling() -> None:
    peer_id = Identity(RFC_SEED).peer_id
    assert is_peer_id(peer_id)
    for other in (peer_id + " ", " " + peer_id, "1" + peer_id, peer_id + "\n", peer_id[:-1], ""):
        assert not is_peer_id(other)


@given(st.text(max_size=80), st.binary(max_size=80), st.binary(max_size=80))
def test_hostile_input_never_raises(peer_id: str, payload: bytes, signature: bytes) -> None:
    assert not verify_signature(peer_id, payload, signature)


@given(st.binary(min_size=64, max_size=64))
def test_a_forged_signature_is_refused(signature: bytes) -> None:
    assert not verify_signature(Identity(RFC_SEED).peer_id, b"payload", signature)


def test_the_file_is_made_once_and_private(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "identity"
    first = load_or_create_identity(file)
    assert load_or_create_identity(file).peer_id == first.peer_id
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == ["identity"]
    assert first.sign(b"x") == load_or_create_identity(file).sign(b"x")
    assert first._private_seed.hex() not in repr(first)


def test_a_file_that_others_can_read_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "identity"
    load_or_create_identity(file)
    file.chmod(0o644)
    load_or_create_identity(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "content",
    [
        "",
        "allmende-identity/1\n",
        "allmende-identity/1\nxyz\n",
        "allmende-identity/2\n" + "00" * 32,
        "allmende-identity/1\n" + "00" * 31,
        "\xff" * 3000,
    ],
)
def test_a_damaged_file_is_named_and_kept(tmp_path: Path, content: str) -> None:
    file = tmp_path / "identity"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(IdentityError, match="identity") as caught:
        load_or_create_identity(file)
    assert str(file) in str(caught.value)
    assert "delete" in caught.value.hint
    assert file.read_text(encoding="latin-1") == content


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    with pytest.raises(IdentityError) as caught:
        load_or_create_identity(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.system
@pytest.mark.slow
def test_processes_that_create_at_once_end_with_one_key(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    code = (
        "import sys, pathlib; from p2p.identity import load_or_create_identity as load;"
        "sys.stdin.read(); print(load(pathlib.Path(sys.argv[1])).peer_id)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "identity")],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:  # all wait at their input: let go together
        assert process.stdin is not None
        process.stdin.close()
    peer_ids = set()
    for process in processes:
        with process:
            assert process.stdout is not None
            peer_ids.add(process.stdout.read().strip())
            assert process.wait() == 0
    assert len(peer_ids) == 1
    assert os.listdir(tmp_path) == ["identity"]
