"""The record survives disk faults: torn writes, changed bytes, lost files."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest

from swarm import durable
from swarm.errors import CorruptState, StateError
from swarm.network.rounds.record_file import ChainFile, RecordFile
from swarm.protocol.chain.chain_record import ABSTAIN_HEIGHTS
from swarm.protocol.chain.gaps import between, filled, gaps
from swarm.protocol.chain.trust import Chain
from swarm.protocol.messages.events import Record
from swarm.protocol.messages.messages import Accepted, Ballot, Link
from tests.protocol.chain.test_trust import chain_of, reform, signed
from tests.protocol.round_pump import found, make_rules

FIRST = Record(replace(found(make_rules(), ["A", "B"]), run="run-1"), None, None)
SECOND = replace(FIRST, promised=Ballot(2, "A"), accepted=Accepted(Ballot(2, "A"), FIRST.tip))


@pytest.fixture
def file(tmp_path: Path) -> RecordFile:
    return RecordFile(tmp_path / "record")


@pytest.fixture
def written(file: RecordFile) -> RecordFile:
    """A file with two records: the newest and its predecessor."""
    file.write(FIRST)
    file.write(SECOND)
    return file


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def unreadable(path: Path) -> None:
    """As with a bad sector: reading raises OSError, not a missing file."""
    path.unlink()
    path.mkdir()


def test_a_peer_that_never_wrote_has_none(file: RecordFile) -> None:
    assert file.read() is None
    assert file.read_earlier() is None


def test_the_newest_record_comes_back_as_it_was(written: RecordFile) -> None:
    assert written.read() == SECOND


@pytest.mark.parametrize("damage", [cut, flip, empty, unreadable, os.unlink])
def test_a_damaged_newest_record_is_replaced_by_its_predecessor_without_a_vote(
    written: RecordFile, damage, caplog
) -> None:
    damage(written.path)
    # Its peer may have voted at the next height, and again after a tip that it forgot.
    assert written.read() == replace(FIRST, abstain_until_height=FIRST.tip.height + ABSTAIN_HEIGHTS)
    assert "without voting" in caplog.text


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EACCES, StateError),
        (errno.EPERM, StateError),
        (errno.EMFILE, OSError),
        (errno.ENFILE, OSError),
        (errno.ENOMEM, OSError),
    ],
)
def test_a_record_that_this_process_may_not_open_now_is_not_taken_for_a_damaged_one(
    written: RecordFile, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    real = Path.read_bytes

    def refusing(path: Path) -> bytes:
        if path == written.path:
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", refusing)
    with pytest.raises(kind) as raised:
        written.read()
    assert not isinstance(raised.value, CorruptState)
    assert str(written.path) in str(raised.value) and os.strerror(number) in str(raised.value)
    if kind is StateError:
        assert "run it as the user that owns it" in str(raised.value)
    monkeypatch.setattr(Path, "read_bytes", real)
    assert written.read() == SECOND


@pytest.mark.parametrize("damage", [cut, flip, empty, unreadable])
def test_no_intact_record_is_an_error_that_names_the_files(written: RecordFile, damage) -> None:
    damage(written.path)
    damage(written.previous)
    with pytest.raises(CorruptState, match=r"record .*record\.previous"):
        written.read()


def test_the_only_record_damaged_is_an_error_not_a_fresh_start(file: RecordFile) -> None:
    file.write(FIRST)
    cut(file.path)
    with pytest.raises(CorruptState):
        file.read()


@pytest.mark.parametrize("call", ["fsync", "link", "replace"])
def test_a_crash_anywhere_in_a_write_leaves_the_old_record(
    file: RecordFile, call: str, monkeypatch
) -> None:
    file.write(FIRST)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            file.write(SECOND)
    assert file.read() == FIRST
    file.write(SECOND)
    assert file.read() == SECOND


@pytest.mark.parametrize("damage", [cut, flip, empty, os.unlink])
@pytest.mark.parametrize("again", [cut, flip, empty, os.unlink])
def test_a_record_that_is_damaged_again_after_the_next_write_is_replaced_again(
    written: RecordFile, damage, again
) -> None:
    damage(written.path)
    found = written.read()
    assert found is not None
    later = replace(found, promised=Ballot(3, "B"))
    written.write(later)
    assert written.read() == later
    again(written.path)
    until_height = FIRST.tip.height + ABSTAIN_HEIGHTS
    assert written.read() == replace(later, abstain_until_height=until_height)


@pytest.mark.parametrize("damage", [cut, os.unlink])
@pytest.mark.parametrize("moment", range(9))
def test_a_kill_at_any_moment_of_a_write_after_damage_leaves_an_intact_record(
    written: RecordFile, damage, moment: int, monkeypatch
) -> None:
    damage(written.path)
    found = written.read()
    assert found is not None
    later = replace(found, promised=Ballot(3, "B"))
    calls = 0

    def killing(real):
        def call(*given, **named):
            nonlocal calls
            calls += 1
            if calls > moment:
                raise KeyboardInterrupt
            return real(*given, **named)

        return call

    with monkeypatch.context() as patched:
        for owner, name in ((os, "fsync"), (os, "link"), (Path, "replace"), (Path, "unlink")):
            patched.setattr(owner, name, killing(getattr(owner, name)))
        with suppress(KeyboardInterrupt):
            written.write(later)
    # For each of two files: unlink, fsync, replace, fsync of the folder.
    assert (calls > moment) == (moment < 8)
    assert written.read() in (found, later)
    written.write(later)
    assert written.read() == later


def test_a_record_before_the_last_but_one_is_never_fallen_back_to(written: RecordFile) -> None:
    """The peer of such a record may have voted at more heights than it abstains from."""
    cut(written.path)  # while its peer runs, and knows its promises
    later = replace(FIRST, tip=replace(FIRST.tip, height=2, round=2))
    written.write(later)
    cut(written.path)
    found = written.read()
    assert found is not None and found.tip == later.tip


def test_a_record_is_durable_before_it_gets_its_name(written: RecordFile, monkeypatch) -> None:
    calls: list[str] = []
    for call in ("fsync", "replace"):
        real = getattr(os, call)
        monkeypatch.setattr(os, call, lambda *a, r=real, c=call: (calls.append(c), r(*a))[1])
    written.write(FIRST)
    assert calls == ["fsync", "replace", "replace", "fsync"], "content, names, folder"


def test_going_back_before_a_lost_state_forgets_the_votes_on_it(written: RecordFile) -> None:
    later = replace(FIRST, tip=replace(FIRST.tip, height=1, round=1))
    written.write(later)
    assert written.read_earlier() == replace(
        FIRST, abstain_until_height=FIRST.tip.height + ABSTAIN_HEIGHTS
    )
    assert written.read() == later


def test_a_chain_that_is_replaced_on_disk_keeps_the_reforms_that_it_had(tmp_path: Path) -> None:
    """The previous record may be on a reform; see `with_reforms`."""
    links = chain_of(["abcd"] * 4)
    left = signed(reform(links[1].head, "a"), "a", parent=links[1].head)
    chain = ChainFile(tmp_path / "chain")
    chain.append([*links[:2], left])
    chain.rewrite(lambda: links)
    assert chain.read() == (left, *links)


def test_a_chain_that_cannot_be_read_proves_less_and_keeps_no_peer_from_starting(
    written: RecordFile, caplog: pytest.LogCaptureFixture
) -> None:
    written.chain.path.mkdir()
    assert written.read_chain(SECOND).trusted >= {SECOND.tip.digest}
    assert "chain cannot be read: Is a directory" in caplog.text


def bad_sector(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_chain_that_cannot_be_read_is_replaced_and_appended_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    links, chain = chain_of(["abcd"] * 4), ChainFile(tmp_path / "chain")
    chain.append(links[:2])
    with monkeypatch.context() as damaged:
        damaged.setattr(os, "pread", bad_sector)
        chain.append(links[2:])
    assert chain.read() == tuple(links)
    with monkeypatch.context() as damaged:
        damaged.setattr(ChainFile, "_lines", bad_sector)
        chain.rewrite(lambda: links[1:])
    assert "chain cannot be read: Input/output error" in caplog.text
    assert chain.read() == tuple(links[1:])


def record_at(links: list[Link]) -> Record:
    tip = SimpleNamespace(head=links[-1].head)
    parent = SimpleNamespace(head=links[-2].head)
    return cast(Record, SimpleNamespace(tip=tip, parent=parent, certificate=links[-1].certificate))


@pytest.mark.parametrize("how", ["torn", "flipped", "first", "gone"])
def test_links_of_a_damaged_chain_are_known_to_be_lost(tmp_path: Path, how: str) -> None:
    links = chain_of(["abcd", "abcx", "abyx", "azyx", "wzyx", "wzyv", "wzuv", "wtuv", "stuv"])
    file = RecordFile(tmp_path / "record")
    file.chain.append(links)
    path, content = file.chain.path, file.chain.path.read_bytes()
    lines = content.splitlines(keepends=True)
    middle = len(b"".join(lines[:4])) + len(lines[4]) // 2
    if how == "gone":
        path.unlink()
    elif how == "torn":
        path.write_bytes(content[:middle] + content[-len(lines[-1]) :])
    else:
        at = 100 if how == "first" else middle
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    chain = file.read_chain(record_at(links), links[0].head)
    assert chain.links[0].head == links[0].head
    assert chain.tip == links[-1].head
    whole = Chain(tuple(links))
    if how != "first":  # nothing comes between manifest 0 and the next one
        (gap,) = gaps(chain)
        found = between(whole, gap.question)
        chain, problem = filled(chain, (gap.before, *found))
        assert problem is None
    assert gaps(chain) == ()
    file.chain.rewrite(lambda: chain.links)
    assert file.read_chain(record_at(links), links[0].head).links == chain.links
    assert [link.head for link in chain.links] == [link.head for link in links]


def test_what_is_appended_while_a_chain_is_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, chain = chain_of(["abcd"] * 9), ChainFile(tmp_path / "chain")
    chain.append(links[:6])
    sync = durable.sync_file

    def meanwhile(path: Path) -> None:
        sync(path)
        chain.append(links[6:])

    monkeypatch.setattr(durable, "sync_file", meanwhile)
    chain.rewrite(lambda: (links[0], links[5]))
    assert chain.read() == (links[0], *links[5:])


def test_a_chain_file_of_which_little_is_kept_is_replaced_at_the_start(tmp_path: Path) -> None:
    links = chain_of(["abcd"] * 300)
    file = RecordFile(tmp_path / "record")
    file.chain.append(links)
    chain = file.read_chain(record_at(links))
    assert len(chain.links) < 70
    assert file.chain.read() == chain.links
