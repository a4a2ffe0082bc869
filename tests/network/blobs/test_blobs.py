from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from swarm.errors import BadBlob, StateError
from swarm.network.blobs import packs
from swarm.network.blobs.blob_store import LEASE_S, BlobStore
from swarm.protocol.values.digests import PIECE_BYTES, digest_of, piece_index


def content(seed: int, num_bytes: int = 1000) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "packs").iterdir())


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path) -> BlobStore:
    return BlobStore(tmp_path) if request.param == "disk" else BlobStore()


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, PIECE_BYTES, PIECE_BYTES + 1])
def test_what_was_put_is_read_back(store, num_bytes):
    blob = content(0, num_bytes)
    digest = store.put(blob)
    assert digest == digest_of(blob)
    assert store.has(digest)
    assert store.size(digest) == num_bytes
    view = store.get(digest)
    assert view == blob
    assert view.readonly
    assert store.index(digest) == piece_index(blob)
    assert store.verify([digest]) == []


def test_parts_are_cut_at_the_end(store):
    digest = store.put(b"0123456789")
    assert store.read(digest, 2, 3) == b"234"
    assert store.read(digest, 8, 100) == b"89"
    assert store.read(digest, 10, 1) == b""


def test_what_is_not_here_is_none(store):
    absent = digest_of(b"absent")
    assert not store.has(absent)
    assert store.get(absent) is None
    assert store.read(absent, 0, 1) is None
    assert store.size(absent) is None
    assert store.index(absent) is None
    assert store.verify([absent]) == [absent]
    with pytest.raises(StateError, match=absent):
        store.sync([absent])


def test_a_blob_that_is_put_twice_takes_room_once(store):
    digest = store.put(content(0))
    taken = store.num_bytes
    assert store.put(bytearray(content(0)), digest) == digest
    assert store.num_bytes == taken
    assert len(store) == 1


def test_only_what_was_synced_survives(tmp_path):
    store = BlobStore(tmp_path)
    kept, lost = store.put(content(0)), store.put(content(1))
    store.sync([kept])
    later = store.put(content(2))
    again = BlobStore(tmp_path)  # as after kill -9: nobody closed anything
    assert again.get(kept) == content(0)
    assert not again.has(lost)
    assert not again.has(later)
    assert files(tmp_path) == ["00000000.index", "00000000.pack"]


def test_a_second_sync_adds_to_the_first(tmp_path):
    store = BlobStore(tmp_path)
    first, second = store.put(content(0)), store.put(content(1))
    store.sync([first])
    third = store.put(content(2))
    store.sync([second, third])
    store.sync([first, second, third])
    assert BlobStore(tmp_path).verify([first, second, third]) == []


def test_new_packs_never_take_the_name_of_one_that_is_there(tmp_path):
    for seed in range(3):
        store = BlobStore(tmp_path)
        store.sync([store.put(content(seed))])
    assert BlobStore(tmp_path).verify([digest_of(content(seed)) for seed in range(3)]) == []
    assert len(files(tmp_path)) == 6


def test_a_crash_between_pack_and_index_forgets_the_blob_and_nothing_else(tmp_path, monkeypatch):
    store = BlobStore(tmp_path)
    safe = store.put(content(0))
    store.sync([safe])
    lost = store.put(content(1))
    monkeypatch.setattr(packs.os, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.sync([lost])
    monkeypatch.undo()
    assert "00000001.index.new" in files(tmp_path)
    again = BlobStore(tmp_path)
    assert again.get(safe) == content(0)
    assert not again.has(lost)
    assert files(tmp_path) == ["00000000.index", "00000000.pack"]


def test_the_content_is_durable_before_the_index_names_it(tmp_path, monkeypatch):
    order = []
    for name in ("fdatasync", "replace", "fsync"):
        real = getattr(os, name)

        def note(*arguments, name=name, real=real):
            order.append(name)
            return real(*arguments)

        monkeypatch.setattr(packs.os, name, note)
    store = BlobStore(tmp_path)
    order.clear()
    store.sync([store.put(content(0))])
    assert order == ["fdatasync", "fsync", "replace", "fsync"]


def test_a_full_disk_is_a_clear_error_and_forgets_the_blob(tmp_path, monkeypatch):
    store = BlobStore(tmp_path)
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(packs.os, "pwrite", full)
    with pytest.raises(StateError, match="free some space"):
        store.put(content(0))
    monkeypatch.undo()
    assert len(store) == 0
    assert store.get(store.put(content(0))) == content(0)


def test_a_truncated_pack_loses_what_was_cut_off_only(tmp_path, caplog):
    store = BlobStore(tmp_path)
    first, second = store.put(content(0)), store.put(content(1))
    store.sync([first, second])
    os.truncate(tmp_path / "packs" / "00000000.pack", 1500)
    again = BlobStore(tmp_path)
    assert again.get(first) == content(0)
    assert not again.has(second)
    assert second in caplog.text


def test_a_pack_that_shrinks_under_us_is_detected(tmp_path):
    store = BlobStore(tmp_path)
    digest = store.put(content(0))
    store.sync([digest])
    os.truncate(tmp_path / "packs" / "00000000.pack", 10)
    with pytest.raises(StateError, match="ends before"):
        store.get(digest)
    assert store.verify([digest]) == [digest]
    assert not store.has(digest)


def test_a_flipped_byte_is_found_and_the_blob_dropped_for_good(tmp_path):
    store = BlobStore(tmp_path)
    good, bad = store.put(content(0)), store.put(content(1))
    store.sync([good, bad])
    path = tmp_path / "packs" / "00000000.pack"
    changed = bytearray(path.read_bytes())
    changed[1500] ^= 1
    path.write_bytes(changed)
    again = BlobStore(tmp_path)
    assert again.verify([good, bad]) == [bad]
    assert again.has(good)
    assert not again.has(bad)
    assert not BlobStore(tmp_path).has(bad), "nor does it come back"
    assert again.put(content(1)) == bad
    assert again.verify([bad]) == []


@pytest.mark.parametrize("change", ["flip", "cut", "empty"])
def test_a_changed_index_loses_its_pack_and_leaves_the_others(tmp_path, change, caplog):
    store = BlobStore(tmp_path)
    lost = store.put(content(0))
    store.sync([lost])
    kept = store.put(content(1))
    store.sync([kept])
    path = tmp_path / "packs" / "00000000.index"
    whole = path.read_bytes()
    flipped = whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]
    path.write_bytes({"flip": flipped, "cut": whole[:-3], "empty": b""}[change])
    again = BlobStore(tmp_path)
    assert not again.has(lost)
    assert again.get(kept) == content(1)
    assert "torn or was changed" in caplog.text
    assert files(tmp_path) == ["00000001.index", "00000001.pack"]


def test_collecting_deletes_packs_without_blobs(tmp_path):
    store = BlobStore(tmp_path)
    old, new = store.put(content(0)), None
    store.sync([old])
    new = store.put(content(1))
    store.sync([new])
    assert store.collect({new}) == 1
    assert files(tmp_path) == ["00000001.index", "00000001.pack"]
    assert not store.has(old)
    assert store.get(new) == content(1)


def test_a_pack_that_is_mostly_garbage_is_rewritten_and_stays_durable(tmp_path):
    store = BlobStore(tmp_path)
    digests = [store.put(content(seed)) for seed in range(5)]
    unsynced = store.put(content(9))
    store.sync(digests)
    assert store.collect({*digests[:3], unsynced}) == 2
    assert files(tmp_path) == ["00000000.index", "00000000.pack"], "four of six are too few"
    assert store.collect({digests[0], unsynced}) == 2
    assert store.num_bytes == 2000
    assert store.get(unsynced) == content(9)
    again = BlobStore(tmp_path)
    assert again.verify([digests[0]]) == []
    assert not again.has(unsynced)


def test_a_crash_while_rewriting_loses_nothing(tmp_path, monkeypatch):
    store = BlobStore(tmp_path)
    digests = [store.put(content(seed)) for seed in range(5)]
    store.sync(digests)
    for step in ("fdatasync", "replace"):
        monkeypatch.setattr(packs.os, step, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            BlobStore(tmp_path).collect({digests[0]})
        monkeypatch.undo()
        assert BlobStore(tmp_path).verify([digests[0]]) == []


def test_a_reader_that_started_before_a_collection_still_succeeds(store):
    digest = store.put(content(0))
    view = store.get(digest)
    place = store._places[digest]
    store.collect(set())
    assert view == content(0)
    assert place.pack.read(place.offset, 0, place.num_bytes) == content(0)
    assert store.get(digest) is None


def test_pins_hold_what_is_here_and_what_is_to_come(store):
    early, late = digest_of(content(0)), digest_of(content(1))
    store.put(content(0))
    store.pin([early, late])
    store.pin([late])
    store.put(content(1))
    assert store.collect(set()) == 0
    store.unpin([early, late])
    assert store.collect(set()) == 1
    assert store.has(late)
    store.unpin([late])
    assert store.collect(set()) == 1


def test_leases_keep_two_manifests_for_ten_minutes(store):
    digests = [store.put(content(seed)) for seed in range(3)]
    assert store.lease("first", digests[:1], now=0.0)
    assert store.lease("second", digests[1:2], now=1.0)
    assert not store.lease("third", digests[2:], now=2.0), "two extra manifests at most"
    assert store.lease("first", digests[:1], now=LEASE_S - 1), "further GETs do not prolong it"
    assert store.collect(set(), now=3.0) == 1
    assert store.collect(set(), now=LEASE_S + 0.5) == 1
    assert store.has(digests[1])
    assert store.collect(set(), now=LEASE_S + 1.5) == 1


def test_a_large_blob_arrives_in_pieces_in_any_order(store):
    blob = content(0, 2 * PIECE_BYTES + 5)
    partial = store.writer(digest_of(blob), len(blob))
    partial.set_index(piece_index(blob))
    view = memoryview(blob)
    for number in (2, 0):
        partial.write_piece(number, view[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
    assert store.writer(digest_of(blob), len(blob)) is partial, "resumed, not restarted"
    assert [number for number in range(3) if not partial.has_piece(number)] == [1]
    assert not partial.complete
    assert not store.has(partial.digest)
    assert store.bytes_here(partial.digest, len(blob)) == 2 * PIECE_BYTES
    partial.write_piece(1, view[PIECE_BYTES : 2 * PIECE_BYTES])
    assert partial.content().whole() == blob
    assert store.bytes_here(partial.digest, len(blob)) == len(blob)
    store.keep(partial)
    assert store.bytes_here(partial.digest, len(blob)) == len(blob)
    assert store.bytes_here("00" * 32, len(blob)) == 0
    assert store.get(partial.digest) == blob
    store.sync([partial.digest])
    assert store.verify([partial.digest]) == []


def test_wrong_pieces_and_indexes_are_refused(store):
    blob = content(0, PIECE_BYTES + 1)
    partial = store.writer(digest_of(blob), len(blob))
    index = piece_index(blob)
    for wrong in (b"", index[:-1], index + index[:32], bytes(64)):
        with pytest.raises(BadBlob) as refused:
            partial.set_index(wrong)
        assert refused.value.reason == "blob_index"
    partial.set_index(index)
    for number, piece in [(0, blob[:-2]), (1, b"x"), (0, blob[PIECE_BYTES:])]:
        with pytest.raises(BadBlob) as refused:
            partial.write_piece(number, memoryview(piece))
        assert refused.value.reason == "blob_digest"
    assert not any(partial.has_piece(number) for number in range(2))


def test_what_is_arriving_survives_a_collection_only_when_pinned(store):
    blob = content(0, PIECE_BYTES + 1)
    digest = digest_of(blob)
    store.pin([digest])
    partial = store.writer(digest, len(blob))
    store.collect(set())
    assert store.writer(digest, len(blob)) is partial
    store.unpin([digest])
    store.collect(set())
    assert store.writer(digest, len(blob)) is not partial


def test_discarded_pieces_give_their_room_back(tmp_path):
    store = BlobStore(tmp_path)
    partial = store.writer("00" * 32, PIECE_BYTES + 1)
    store.discard(partial)
    store.discard(partial)
    store.collect(set())
    assert files(tmp_path) == []


def test_a_full_pack_is_followed_by_another(tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "PACK_BYTES", 1500)
    store = BlobStore(tmp_path)
    digests = [store.put(content(seed)) for seed in range(4)]
    store.sync(digests)
    assert len(files(tmp_path)) == 4
    assert BlobStore(tmp_path).verify(digests) == []


def test_a_file_where_the_folder_should_be_is_a_state_error(tmp_path):
    (tmp_path / "packs").write_text("")
    with pytest.raises(StateError, match="packs"):
        BlobStore(tmp_path)


def test_puts_reads_syncs_and_collections_at_the_same_time_lose_nothing(store):
    """Six threads for two thousand operations; each owns its blobs and pins the live ones."""
    errors = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        mine: dict[str, bytes] = {}
        for step in range(300):
            blob = choose.randbytes(choose.choice([0, 10, 1000, 20_000]))
            digest = digest_of(blob)
            store.pin([digest])
            store.put(blob)
            mine[digest] = blob
            some = choose.choice(sorted(mine))
            if store.get(some) != mine[some]:
                errors.append(f"{some} changed or vanished")
            if step % 10 == 0:
                store.sync(choose.sample(sorted(mine), min(3, len(mine))))
            if step % 25 == 0:
                for digest in sorted(mine)[::2]:
                    del mine[digest]
                    store.unpin([digest])
                store.collect(set())

    with ThreadPoolExecutor(6) as pool:
        for finished in [pool.submit(work, seed) for seed in range(6)]:
            finished.result(60)
    assert errors == []


def test_the_disk_begins_before_the_sync(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(packs, "_begin_writeback", begun.append)
    store = BlobStore(tmp_path)
    half = packs.WRITEBACK_BYTES // 2
    store.put(bytes(half))
    assert not begun
    assert begun == [store.file_of(store.put(bytes(half + 1))).pack.fileno()]
    store.put(bytes(half - 1))
    assert len(begun) == 1


@pytest.mark.parametrize(
    "num_bytes", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 9]
)
@pytest.mark.parametrize("part_bytes", [1_000_003, PIECE_BYTES, 3 * PIECE_BYTES])
def test_a_draft_is_the_blob_that_put_would_have_made(store, num_bytes, part_bytes):
    blob, told = content(0, num_bytes), []
    with store.draft(num_bytes, told.append) as draft:
        for start in range(0, num_bytes, part_bytes):
            draft.write(memoryview(blob)[start : start + part_bytes])
        assert store.digests() == []
        digest = draft.finish()
    assert told == [digest]
    assert digest == digest_of(blob)
    assert store.get(digest) == blob
    assert store.index(digest) == piece_index(blob)
    assert b"".join(store.chunks(digest, 1_000_003)) == blob
    store.sync([digest])
    assert store.verify([digest]) == []
    assert store.collect(set()) == 0, "pinned once"
    store.unpin([digest])
    assert store.collect(set()) == 1


def test_a_draft_of_what_is_here_gives_its_room_back(store):
    digest, size = store.put(content(0)), store.num_bytes
    draft = store.draft(1000)
    draft.write(content(0))
    assert draft.finish() == digest
    assert store.num_bytes == size
    assert store.collect(set()) == 0


def test_a_draft_that_an_exception_leaves_is_discarded(tmp_path):
    store = BlobStore(tmp_path)
    with pytest.raises(ZeroDivisionError), store.draft(1000) as draft:
        draft.write(bytes(10))
        raise ZeroDivisionError
    draft.discard()
    store.collect(set())
    assert files(tmp_path) == []
    with pytest.raises(ValueError, match="finished or discarded"):
        draft.write(bytes(1))
    with pytest.raises(ValueError, match="10 of 1000 bytes arrived; the draft is closed"):
        draft.finish()


def test_a_draft_refuses_too_many_and_too_few_bytes(store):
    draft = store.draft(3)
    draft.write(b"ab")
    with pytest.raises(ValueError, match=r"2 \+ 2 bytes for a draft of 3"):
        draft.write(b"cd")
    with pytest.raises(ValueError, match="2 of 3 bytes"):
        draft.finish()
    draft.write(b"c")
    assert store.get(draft.finish()) == b"abc"


def test_chunks_of_what_is_not_here_are_an_error(store):
    with pytest.raises(StateError, match="not in the store"):
        list(store.chunks(digest_of(b"absent"), 10))
