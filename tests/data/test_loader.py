import itertools
import json
import threading

import numpy as np
import pytest
import torch

from swarm.config import RunConfig
from swarm.data.corpus import Split, folder_corpus, is_held_out
from swarm.data.loader import Loader, held_out_sequences, held_out_tokens
from swarm.data.shards import Shards, open_shards
from swarm.data.tokenise import document_tokens
from swarm.errors import DataError

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


def run_of(*, seed=0, batch_tokens=4 * LENGTH, phases=()):
    return RunConfig.model_validate_json(
        json.dumps(
            {
                "run": {"name": "t", "rounds": 2, "seed": seed},
                "model": MODEL,
                "data": {"sequence_length": LENGTH, "validation_tokens": 64},
                "train": {"batch_tokens": batch_tokens, "micro_batch_sequences": 2},
                "optimizer": {"lr": 1e-3, "schedule_steps": 10},
                "round": {"local_steps": 5},
                "phases": phases,
            }
        )
    )


def numbered_shards(*sizes):
    """Shards whose tokens count up, so that a row says where it was cut."""
    edges = np.cumsum([0, *sizes])
    return Shards(tuple(np.arange(a, b) for a, b in itertools.pairwise(edges)))


@pytest.fixture
def loader():
    with Loader(numbered_shards(1000, 500), run_of(), data_index=0) as made:
        yield made


def test_a_batch_has_one_more_token_than_it_predicts(loader):
    batch_BT1 = loader.batch(0, 4 * LENGTH)
    assert batch_BT1.shape == (4, LENGTH + 1)
    assert batch_BT1.dtype == torch.int64


def test_a_row_is_consecutive_and_starts_at_a_window(loader):
    for row in loader.batch(3, 4 * LENGTH).tolist():
        assert row == list(range(row[0], row[0] + LENGTH + 1))
        assert (row[0] if row[0] < 1000 else row[0] - 1000) % LENGTH == 0


def test_no_row_crosses_two_shards_and_one_epoch_predicts_each_token_once():
    with Loader(numbered_shards(1000, 500), run_of(), data_index=0) as loader:
        # 62 and 31 windows: (n - 1) // 16 of each shard.
        assert loader.num_windows == 93
        rows = torch.cat([loader.batch(step, 4 * LENGTH) for step in range(24)])[:93]
    predicted = rows[:, 1:].flatten().tolist()
    assert len(set(predicted)) == len(predicted) == 93 * LENGTH
    assert not any(row[0] < 1000 <= row[-1] for row in rows.tolist())


def test_the_same_three_integers_give_the_same_batch():
    shards = numbered_shards(3000)
    with (
        Loader(shards, run_of(seed=5), data_index=9) as first,
        Loader(shards, run_of(seed=5), data_index=9) as second,
    ):
        for step in range(10):
            first.batch(step, 4 * LENGTH)
        assert torch.equal(first.batch(10, 4 * LENGTH), second.batch(10, 4 * LENGTH))


@pytest.mark.parametrize("other", [{"seed": 6}, {"data_index": 8}, {"step": 11}])
def test_each_of_the_three_integers_matters(other):
    shards = numbered_shards(30_000)
    batches = []
    for changed in ({}, other):
        seed, index, step = ({"seed": 5, "data_index": 9, "step": 10} | changed).values()
        with Loader(shards, run_of(seed=seed), data_index=index) as loader:
            batches.append(loader.batch(step, 4 * LENGTH))
    assert not torch.equal(*batches)


def test_reading_ahead_changes_nothing(loader):
    # In order, repeated, backwards and with another batch: right or wrong guesses of the thread.
    for step, rows in ((0, 4), (1, 4), (2, 4), (2, 4), (7, 4), (6, 4), (7, 2), (8, 2), (9, 4)):
        ahead = loader.batch(step, rows * LENGTH)
        assert torch.equal(ahead, loader.read(step, rows * LENGTH))


def test_the_next_batch_is_read_by_a_thread_before_it_is_asked_for(monkeypatch):
    read, asked = threading.Event(), []
    real_read = Loader.read

    def spy(self, step, batch_tokens):
        asked.append((step, threading.current_thread().name))
        if step == 1:
            read.set()
        return real_read(self, step, batch_tokens)

    monkeypatch.setattr(Loader, "read", spy)
    with Loader(numbered_shards(3000), run_of(), data_index=0) as loader:
        loader.batch(0, 4 * LENGTH)
        assert read.wait(timeout=10)
        assert [step for step, _ in asked] == [0, 1]
        assert all(name.startswith("loader") for _, name in asked)


def test_an_error_in_the_thread_reaches_the_caller(monkeypatch):
    real_read = Loader.read

    def broken_at_two(self, step, batch_tokens):
        if step == 2:
            raise OSError("disk gone")
        return real_read(self, step, batch_tokens)

    monkeypatch.setattr(Loader, "read", broken_at_two)
    with Loader(numbered_shards(3000), run_of(), data_index=0) as loader:
        loader.batch(0, 4 * LENGTH)
        loader.batch(1, 4 * LENGTH)
        with pytest.raises(OSError, match="disk gone"):
            loader.batch(2, 4 * LENGTH)


def test_closing_ends_the_thread():
    with Loader(numbered_shards(3000), run_of(), data_index=0) as loader:
        loader.batch(0, 4 * LENGTH)
        assert any(thread.name.startswith("loader") for thread in threading.enumerate())
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


def test_a_phase_with_smaller_batches_repeats_nothing():
    phases = [{"until_tokens": 10_000, "local_steps": 5, "batch_tokens": 8 * LENGTH}]
    with Loader(numbered_shards(10_000), run_of(phases=phases), data_index=0) as loader:
        large = torch.cat([loader.batch(step, 8 * LENGTH) for step in range(5)])
        small = torch.cat([loader.batch(step, 4 * LENGTH) for step in range(5, 10)])
    firsts = torch.cat([large, small])[:, 0].tolist()
    assert len(set(firsts)) == len(firsts) == 60


def test_a_corpus_below_one_batch_is_an_error_with_both_sizes():
    with pytest.raises(DataError, match="64 tokens holds 3 sequences of 16, less than one batch"):
        Loader(numbered_shards(64), run_of(), data_index=0)


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
    with Loader(open_shards(corpus, tmp_path / "cache"), run, data_index=0) as loader:
        steps = -(-loader.num_windows // 4)
        rows = torch.cat([loader.batch(step, 4 * LENGTH) for step in range(steps)])
    # Rows overlap by one token only, so whole ones are looked at; 17 tokens hold a name.
    shown = {bytes(t for t in row if t < 256).decode() for row in rows.tolist()}
    assert not any(name in row for row in shown for name in held_out)
    trained = {f"[{number:04}]" for number in range(300)} - held_out
    assert all(any(name in row for row in shown) for name in trained)


def test_held_out_tokens_are_whole_held_out_documents_by_digest(tmp_path):
    corpus = write_documents(tmp_path / "text", 300)
    texts = list(corpus.documents())
    tokens = held_out_tokens(texts, 10**6)
    documents = bytes(t if t < 256 else 0 for t in tokens.tolist()).decode().split("\0")[:-1]
    assert set(documents) == {text.decode() for text in texts if is_held_out(text)}
    assert np.array_equal(tokens, held_out_tokens(reversed(texts), 10**6))


@pytest.mark.parametrize("limit", [1, 64, 121, 122, 300])
def test_a_limit_cuts_the_held_out_tokens_and_changes_no_token_before(tmp_path, limit):
    texts = list(write_documents(tmp_path / "text", 300).documents())
    assert np.array_equal(held_out_tokens(texts, limit), held_out_tokens(texts, 10**6)[:limit])


def test_without_a_held_out_document_the_one_with_the_smallest_digest_is():
    kept = [text for text in (b"%d" % n for n in range(20)) if not is_held_out(text)]
    (held_out,) = [text for text in kept if Split.of(kept).holds_out(text)]
    for order in (kept, kept[::-1]):
        assert np.array_equal(held_out_tokens(order, 100), document_tokens(held_out))


def test_a_corpus_without_document_has_no_held_out_tokens():
    with pytest.raises(DataError, match="holds no text"):
        held_out_tokens([], 100)


def test_held_out_sequences_predict_each_token_once():
    sequences_BT1 = held_out_sequences(np.arange(100, dtype=np.uint16), LENGTH)
    assert sequences_BT1.shape == (6, LENGTH + 1)
    assert sequences_BT1[:, 1:].flatten().tolist() == list(range(1, 97))


def test_too_few_held_out_tokens_are_an_error():
    with pytest.raises(DataError, match="16 held-out tokens hold no sequence of 16"):
        held_out_sequences(np.arange(16, dtype=np.uint16), LENGTH)
