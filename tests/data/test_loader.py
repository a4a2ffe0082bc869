import itertools
import json
import threading
from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from swarm.config import RunConfig
from swarm.data import loader as loader_module
from swarm.data.corpus import folder_corpus, is_held_out
from swarm.data.loader import Loader, permute, samples_at, windows_of
from swarm.data.shards import Shards, open_shards
from swarm.data.tokenizer import BYTE
from swarm.errors import DataError
from swarm.protocol.values.work import Book, next_book, num_samples

LENGTH = 16
MODEL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
}


TEXT = ((0, 10**6),)


def run_of(*, seed=0, batch_tokens=4 * LENGTH, phases=()):
    return RunConfig.model_validate_json(
        json.dumps(
            {
                "run": {"name": "t", "rounds": 2, "seed": seed},
                "model": MODEL,
                "data": {"sequence_length": LENGTH, "validation_bytes": 64},
                "train": {"batch_tokens": batch_tokens, "micro_batch_sequences": 2},
                "optimizer": {"lr": 1e-3, "schedule_steps": 10},
                "round": {"local_steps": 5},
                "phases": phases,
            }
        )
    )


def numbered_shards(*sizes):
    """Shards whose tokens count up, so that a row shows its place."""
    edges = np.cumsum([0, *sizes])
    return Shards(tuple(np.arange(a, b) for a, b in itertools.pairwise(edges)))


@pytest.fixture
def loader():
    with Loader(numbered_shards(1000, 500), run_of()) as made:
        yield made


def test_a_batch_has_one_more_token_than_it_predicts(loader):
    batch_BT1 = loader.batch(TEXT, 0, 4 * LENGTH)
    assert batch_BT1.shape == (4, LENGTH + 1)
    assert batch_BT1.dtype == torch.int64


def test_a_row_is_consecutive_and_starts_at_a_window(loader):
    for row in loader.batch(TEXT, 3, 4 * LENGTH).tolist():
        assert row == list(range(row[0], row[0] + LENGTH + 1))
        assert (row[0] if row[0] < 1000 else row[0] - 1000) % LENGTH == 0


def test_no_row_crosses_two_shards_and_one_epoch_predicts_each_token_once():
    with Loader(numbered_shards(1000, 500), run_of()) as loader:
        # 62 and 31 windows: (n - 1) // 16 of each shard.
        assert loader.num_windows == 93
        rows = torch.cat([loader.batch(TEXT, step, 4 * LENGTH) for step in range(24)])[:93]
    predicted = rows[:, 1:].flatten().tolist()
    assert len(set(predicted)) == len(predicted) == 93 * LENGTH
    assert not any(row[0] < 1000 <= row[-1] for row in rows.tolist())


def test_the_same_seed_deal_and_step_give_the_same_batch():
    shards = numbered_shards(3000)
    with Loader(shards, run_of(seed=5)) as first, Loader(shards, run_of(seed=5)) as second:
        for step in range(10):
            first.batch(TEXT, step, 4 * LENGTH)
        again = second.batch(((3, 5), (40, 42)), 0, 4 * LENGTH)
        assert torch.equal(first.batch(TEXT, 10, 4 * LENGTH), second.batch(TEXT, 10, 4 * LENGTH))
        assert torch.equal(first.batch(((3, 5), (40, 42)), 0, 4 * LENGTH), again)


@pytest.mark.parametrize("other", [{"seed": 6}, {"dealt": ((1, 10**6),)}, {"step": 11}])
def test_each_of_the_three_matters(other):
    shards = numbered_shards(30_000)
    batches = []
    for changed in ({}, other):
        seed, dealt, step = ({"seed": 5, "dealt": TEXT, "step": 10} | changed).values()
        with Loader(shards, run_of(seed=seed)) as loader:
            batches.append(loader.batch(dealt, step, 4 * LENGTH))
    assert not torch.equal(*batches)


def test_batches_go_through_the_stretches_of_a_deal_in_their_order(loader):
    dealt = ((50, 53), (7, 8), (60, 64))
    read = torch.cat([loader.batch(dealt, step, 4 * LENGTH) for step in range(2)])
    samples = [50, 51, 52, 7, 60, 61, 62, 63]
    alone = [loader.read(((n, n + 1),), 0, LENGTH) for n in samples]
    assert torch.equal(read, torch.cat(alone))


@pytest.mark.parametrize("step", [2, 3, 100])
def test_what_was_not_dealt_is_not_read(loader, step):
    dealt = ((50, 57), (3, 7))  # 11 samples: two batches of four, and three samples over
    with pytest.raises(DataError, match=f"local step {step} of 4 sequences is beyond the 11 seq"):
        loader.batch(dealt, step, 4 * LENGTH)


def test_a_batch_at_the_end_of_a_deal_asks_for_nothing_beyond_it(loader):
    dealt = ((0, 11),)
    for _ in range(3):
        assert loader.batch(dealt, 1, 4 * LENGTH).shape == (4, LENGTH + 1)


def test_another_text_than_the_runs_is_an_error_with_both_sizes():
    with pytest.raises(DataError, match="has 93 sequences of 16 tokens, the run's has 94"):
        Loader(numbered_shards(1000, 500), run_of(), agreed_windows=94)
    Loader(numbered_shards(1000, 500), run_of(), agreed_windows=93).close()


@pytest.mark.parametrize("seed", range(5))
def test_peers_that_come_and_go_read_a_text_exactly_once(seed):
    """In a lap, all samples are read once, except those that are still dealt or open.

    Streams that begin at a hash of each peer's id covered 69 % of it on average, with four peers
    that never left.
    """
    random, windows, book, counted = Random(seed), [], Book(), {}
    names = (f"peer {number}" for number in itertools.count())
    members = [next(names) for _ in range(4)]
    with Loader(numbered_shards(30_000), run_of()) as loader:
        lap = loader.num_windows
        while True:
            book = next_book(book, counted, {peer: random.randint(4, 40) for peer in members})
            if book.cursor > lap:
                break
            rows = random.choice([2, 4])  # in a batch of the phase
            for peer, dealt in book.dealt.items():
                steps = random.randint(0, num_samples(dealt) // rows)
                counted[peer] = steps * rows
                for step in range(steps):
                    batch_BT1 = loader.batch(dealt, step, rows * LENGTH)
                    windows += [row[0] // LENGTH for row in batch_BT1.tolist()]
            members += [next(names) for _ in range(random.choice([0, 0, 1]))]
            members = members[random.choice([0, 0, len(members) > 2]) :]
    unread = [*book.holes, *(each for dealt in book.dealt.values() for each in dealt)]
    num_unread = sum(min(stop, lap) - min(start, lap) for start, stop in unread)
    assert len(set(windows)) == len(windows) == lap - num_unread
    assert num_unread < 0.1 * lap


def test_reading_ahead_changes_nothing(loader):
    # In order, repeated, backwards and with another batch: the thread guesses right or wrong.
    for step, rows in ((0, 4), (1, 4), (2, 4), (2, 4), (7, 4), (6, 4), (7, 2), (8, 2), (9, 4)):
        ahead = loader.batch(TEXT, step, rows * LENGTH)
        assert torch.equal(ahead, loader.read(TEXT, step, rows * LENGTH))


def test_the_next_batch_is_read_by_a_thread_before_it_is_asked_for(monkeypatch):
    read, asked = threading.Event(), []
    real_read = Loader.read

    def spy(self, dealt, step, batch_tokens):
        asked.append((step, threading.current_thread().name))
        if step == 1:
            read.set()
        return real_read(self, dealt, step, batch_tokens)

    monkeypatch.setattr(Loader, "read", spy)
    with Loader(numbered_shards(3000), run_of()) as loader:
        loader.batch(TEXT, 0, 4 * LENGTH)
        assert read.wait(timeout=10)
        assert [step for step, _ in asked] == [0, 1]
        assert all(name.startswith("loader") for _, name in asked)


def test_an_error_in_the_thread_reaches_the_caller(monkeypatch):
    real_read = Loader.read

    def broken_at_two(self, dealt, step, batch_tokens):
        if step == 2:
            raise OSError("disk gone")
        return real_read(self, dealt, step, batch_tokens)

    monkeypatch.setattr(Loader, "read", broken_at_two)
    with Loader(numbered_shards(3000), run_of()) as loader:
        loader.batch(TEXT, 0, 4 * LENGTH)
        loader.batch(TEXT, 1, 4 * LENGTH)
        with pytest.raises(OSError, match="disk gone"):
            loader.batch(TEXT, 2, 4 * LENGTH)


def test_a_disk_that_does_not_answer_holds_nobody_up(monkeypatch, caplog):
    """The deadline raised, but leaving then joined the hanging thread."""
    began, answers = threading.Event(), threading.Event()
    hanging = Loader(numbered_shards(1000, 500), run_of())
    monkeypatch.setattr(loader_module, "_READ_DEADLINE_S", 0.05)
    monkeypatch.setattr(loader_module, "END_S", 0.05)
    monkeypatch.setattr(Loader, "read", lambda *_: began.set() or answers.wait())
    with pytest.raises(DataError, match="no batch within"):
        hanging.batch(TEXT, 0, 4 * LENGTH)
    assert began.wait(30.0)
    leaver = threading.Thread(target=hanging.close, daemon=True)
    leaver.start()
    leaver.join(30.0)
    has_left = not leaver.is_alive()
    answers.set()
    assert has_left
    assert "a disk may not answer: loader" in caplog.text


def test_closing_ends_the_thread():
    before = set(threading.enumerate())
    with Loader(numbered_shards(3000), run_of()) as loader:
        loader.batch(TEXT, 0, 4 * LENGTH)
        (own,) = (each for each in threading.enumerate() if each not in before)
        assert own.name.startswith("loader")
    assert not own.is_alive()


def test_a_corpus_below_one_batch_is_an_error_with_both_sizes():
    with pytest.raises(DataError, match="64 tokens holds 3 sequences of 16, less than one batch"):
        Loader(numbered_shards(64), run_of())


def write_documents(folder, count):
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:04}.txt").write_text(f"[{number:04}]" * 20)
    return folder_corpus(folder)


def test_no_training_batch_ever_shows_a_held_out_document(tmp_path):
    corpus = write_documents(tmp_path / "text", 300)
    texts = list(corpus.documents())
    held_out = {text[:6].decode() for text in texts if is_held_out(text)}
    assert len(held_out) >= 3
    run = run_of()
    with Loader(open_shards(corpus, tmp_path / "cache", BYTE), run) as loader:
        steps = -(-loader.num_windows // 4)
        rows = torch.cat([loader.batch(TEXT, step, 4 * LENGTH) for step in range(steps)])
    # Rows overlap by one token only, so whole rows are compared. A name fits 17 tokens.
    shown = {bytes(t for t in row if t < 256).decode() for row in rows.tolist()}
    assert not any(name in row for row in shown for name in held_out)
    trained = {f"[{number:04}]" for number in range(300)} - held_out
    assert all(any(name in row for row in shown) for name in trained)


NUM_WINDOWS = 186_418  # of 64 bytes, in the standard library of Python 3.11


@given(size=st.integers(1, 3000), key=st.text(max_size=5))
def test_permute_hits_every_place_once(size, key):
    places = np.arange(size, dtype=np.uint64)
    assert sorted(permute(places, size, key)) == list(range(size))


def test_permute_depends_on_its_key_and_mixes_well():
    places = np.arange(10_000, dtype=np.uint64)
    first, second = permute(places, 10_000, "1 lap 0"), permute(places, 10_000, "1 lap 1")
    # Two random permutations agree at one place on average.
    assert np.count_nonzero(first == second) < 10
    # Correlation of a random permutation with its places: 0 with a deviation of 0.01.
    assert abs(np.corrcoef(places, first)[0, 1]) < 0.05
    # Neighbors must not stay together: a step of 1 happens twice on average, in either direction.
    assert np.count_nonzero(np.abs(np.diff(first)) == 1) < 12


@given(
    stretches=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9))),
    first=st.integers(0, 40),
    count=st.integers(0, 40),
)
def test_any_part_of_the_stretches_is_that_of_the_whole(stretches, first, count):
    stretches = tuple((start, start + size) for start, size in stretches)
    whole = [n for start, stop in stretches for n in range(start, stop)]
    assert samples_at(stretches, first, count).tolist() == whole[first : first + count]


def test_a_lap_has_every_window_once_and_the_next_one_in_another_order():
    first = windows_of(3, np.arange(1000), 1000)
    second = windows_of(3, np.arange(1000, 2000), 1000)
    assert sorted(first) == sorted(second) == list(range(1000))
    assert np.count_nonzero(first == second) < 10


@given(samples=st.lists(st.integers(0, 5000)))
def test_a_window_depends_on_its_sample_alone_not_on_how_it_is_asked_for(samples):
    known = windows_of(1, np.arange(5001), 777)
    found = windows_of(1, np.array(samples, dtype=np.int64), 777)
    assert found.tolist() == [known[sample] for sample in samples]


def test_another_seed_is_another_order():
    samples = np.arange(1000)
    first, second = (windows_of(seed, samples, NUM_WINDOWS) for seed in (0, 1))
    assert np.count_nonzero(first == second) < 5


def test_the_order_never_changes():
    """Peers of one run may have different versions of this package."""
    assert windows_of(42, np.arange(5), 1000).tolist() == [294, 7, 643, 35, 834]
