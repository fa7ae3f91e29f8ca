"""`allmende identity`: the key is shown, copied and replaced, and never by accident."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from p2p.errors import IdentityError
from p2p.identity import copy_identity, load_or_create_identity
from tests.tui.command_line import run
from volunteer.agent.signed_mark import SignedMark
from volunteer.files import lock_folder

pytestmark = pytest.mark.slow
RUN = "ab" * 32


def key_of(home: Path) -> str:
    return load_or_create_identity(home / "identity.key").peer_id


def test_without_a_key_nothing_is_made_up(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for words in (["show"], ["export", str(tmp_path / "copy")]):
        refused = run(home, "identity", *words)
        assert refused.returncode == 1
        assert "there is no identity yet" in refused.stderr
    assert not (tmp_path / "copy").exists()
    assert not (home / "identity.key").exists()


def test_a_copy_speaks_in_the_same_name_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    peer_id = key_of(home)
    assert run(home, "identity", "show").stdout.startswith(peer_id)
    shown = json.loads(run(home, "identity", "show", "--json").stdout)
    assert shown == {"peer_id": peer_id, "file": str(home / "identity.key"), "kept_file": ""}
    assert run(home, "identity", "export", str(copy), umask=0).returncode == 0
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert load_or_create_identity(copy).peer_id == peer_id
    again = run(home, "identity", "export", str(copy))
    assert again.returncode == 1
    assert "exists, and stays as it is" in again.stderr


def test_a_copy_goes_where_links_do_not_and_has_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    peer_id = key_of(home)
    assert "is a folder" in run(home, "identity", "export", str(tmp_path)).stderr
    odd = os.fsencode(tmp_path) + b"/odd\xff"
    told = run(home, "identity", "export", os.fsdecode(odd), "--json")
    assert told.returncode == 0, told.stderr
    assert load_or_create_identity(Path(os.fsdecode(odd))).peer_id == peer_id
    refused = run(home, "identity", "export", "/proc/no/such")
    assert "cannot write /proc/no/such" in refused.stderr

    def no_link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)  # as on a memory stick
    copy = tmp_path / "stick"
    assert copy_identity(home / "identity.key", copy).peer_id == peer_id
    with pytest.raises(IdentityError, match="exists"):
        copy_identity(home / "identity.key", copy)
    assert not list(tmp_path.glob(".*"))


def test_an_import_heals_a_damaged_key_and_keeps_it(tmp_path: Path) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    peer_id = key_of(home)
    assert run(home, "identity", "export", str(copy)).returncode == 0
    (home / "identity.key").write_bytes(b"damaged")
    done = run(home, "identity", "import", str(copy))
    assert done.returncode == 0, done.stderr
    assert key_of(home) == peer_id
    (kept,) = home.glob("identity-damaged-*.key")
    assert kept.read_bytes() == b"damaged"
    assert str(kept) in done.stdout


def test_an_import_keeps_the_key_before_and_knows_not_how_far_it_signed(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    before, copy = key_of(home), tmp_path / "copy"
    moved = key_of(other)
    assert run(other, "identity", "export", str(copy)).returncode == 0
    done = json.loads(run(home, "identity", "import", str(copy), "--json").stdout)
    assert done["peer_id"] == moved == key_of(home)
    assert load_or_create_identity(Path(done["kept_file"])).peer_id == before
    mark = SignedMark(home / "signed", moved, RUN, "dense")
    assert mark.has_lost(None)
    assert not SignedMark(home / "signed", before, RUN, "dense").has_lost(None)
    mark.note(9)
    assert not SignedMark(home / "signed", moved, RUN, "dense").has_lost(9), "it knows again"
    same = run(home, "identity", "import", str(copy))
    assert "kept in" not in same.stdout
    assert SignedMark(home / "signed", moved, RUN, "dense").has_lost(9), "it was elsewhere again"
    assert not list(home.glob(".*")), "nothing temporary is left"


@pytest.mark.parametrize("content", [b"", b"allmende-identity/1\nabc\n", b"\xff" * 5000])
def test_what_holds_no_key_changes_nothing(tmp_path: Path, content: bytes) -> None:
    home, file = tmp_path / "home", tmp_path / "file"
    peer_id = key_of(home)
    file.write_bytes(content)
    refused = run(home, "identity", "import", str(file))
    assert refused.returncode == 1
    assert "damaged or of another version" in refused.stderr
    assert "delete" not in refused.stderr, "it is not ours to delete"
    os.mkfifo(tmp_path / "pipe")
    assert "no file" in run(home, "identity", "import", str(tmp_path / "pipe")).stderr
    assert "No such file" in run(home, "identity", "import", str(tmp_path / "gone")).stderr
    assert key_of(home) == peer_id
    assert not (home / "signed").exists()


def test_a_key_in_use_is_not_replaced(tmp_path: Path) -> None:
    home, other, copy = tmp_path / "home", tmp_path / "other", tmp_path / "copy"
    before = key_of(home)
    key_of(other)
    assert run(other, "identity", "export", str(copy)).returncode == 0
    with lock_folder(home):
        refused = run(home, "identity", "import", str(copy))
    assert refused.returncode == 1
    assert "allmende stop" in refused.stderr
    assert key_of(home) == before
