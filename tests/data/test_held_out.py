"""The held-out text: its choice, and its measurement like lm-evaluation-harness's."""

import math
from random import Random

import numpy as np
import pytest
import torch

from swarm.data.corpus import Split, is_held_out
from swarm.data.held_out import (
    held_out_documents,
    held_out_windows,
    measured_on,
    whole_held_out,
)
from swarm.data.tokenizer import BYTE
from swarm.errors import DataError

END = 1000


def texts(count=300):
    return [f"[{number:04}] é".encode() * 20 for number in range(count)]


def held_out(count=300):
    return [text for text in texts(count) if is_held_out(text)]


def test_the_held_out_text_is_whole_held_out_documents_by_digest():
    documents = held_out_documents(texts(), 10**6)
    assert set(documents) == set(held_out()) and len(documents) > 3
    assert held_out_documents(reversed(texts()), 10**6) == documents


def test_texts_that_are_all_held_out_are_not_asked_for_their_digests():
    assert set(held_out_documents(texts(), 10**6, are_held_out=True)) == set(texts())


def test_whole_documents_reach_the_limit():
    found = whole_held_out(texts(), 400)
    assert found == held_out_documents(texts(), 10**6)[: len(found)]
    assert sum(map(len, found[:-1])) < 400 <= sum(map(len, found))


@pytest.mark.parametrize("limit", [1, 64, 179, 180, 181, 300, 360, 400])
def test_a_limit_in_bytes_cuts_the_last_document_at_a_character(limit):
    found, everything = held_out_documents(texts(), limit), held_out_documents(texts(), 10**6)
    size = sum(map(len, found))
    assert limit - 1 <= size <= limit, "a character has two bytes here at most"
    assert b"".join(everything)[:size] == b"".join(found)
    assert found[:-1] == everything[: len(found) - 1]
    assert all(document.decode() for document in found)


def test_without_a_held_out_document_the_one_with_the_smallest_digest_is():
    kept = [text for text in (b"%d" % n for n in range(20)) if not is_held_out(text)]
    (instead,) = [text for text in kept if Split.of(kept).holds_out(text)]
    for order in (kept, kept[::-1]):
        assert held_out_documents(order, 100) == [instead]


def test_a_corpus_without_document_has_no_held_out_text():
    with pytest.raises(DataError, match="holds no text"):
        held_out_documents([], 100)
    with pytest.raises(DataError, match="no token"):
        held_out_windows(np.array([END, END]), END, 4, 1)


def rolling_windows(tokens, prefix, max_seq_len):
    """Context and scored tokens of each window.

    Written after the source of lm_eval 0.4: `get_rolling_token_windows` with `context_len=1`, and
    `make_disjoint_window`.
    """
    first = min(max_seq_len, len(tokens))
    pairs = [([prefix, *tokens[: first - 1]], tokens[:first])]
    predicted = first
    while predicted < len(tokens):
        length = min(len(tokens) - predicted, max_seq_len)
        end = predicted + length
        pairs.append((tokens[end - max_seq_len - 1 : end - 1], tokens[end - length : end]))
        predicted += length
    return [(context[: len(context) - (len(scored) - 1)], scored) for context, scored in pairs]


@pytest.mark.parametrize("length", [1, 2, 5, 8, 64])
def test_windows_are_those_of_lm_evaluation_harness(length):
    random = Random(length)
    documents = [[random.randrange(900) for _ in range(size)] for size in (1, 2, 7, 8, 9, 16, 41)]
    stream = [token for document in documents for token in (*document, END)]
    found = []
    for tokens_BT1, scored_BT in held_out_windows(np.array(stream), END, length, 1).windows:
        assert tokens_BT1.shape[1] == scored_BT.shape[1] + 1 <= length + 1
        for row, scored in zip(tokens_BT1.tolist(), scored_BT.tolist(), strict=True):
            first, after = scored.index(True), len(scored) - scored[::-1].index(True)
            assert all(scored[first:after]), "the scored tokens are consecutive"
            found.append((row[: first + 1], row[first + 1 : after + 1]))
    wanted = [pair for each in documents for pair in rolling_windows(each, END, length)]
    assert sorted(found) == sorted(wanted)
    assert sum(len(scored) for _, scored in found) == sum(map(len, documents))


def test_an_unclosed_last_document_counts_and_empty_ones_do_not():
    assert held_out_windows(np.array([END, 1, 2, END, END, 3]), END, 8, 3).num_tokens == 3


def test_many_short_documents_take_memory_by_their_own_length():
    documents = [b"ab"] * 10_000
    measured = measured_on(BYTE, documents, 4096)
    assert sum(tokens.numel() for tokens, _ in measured.windows) <= 4 * 10_000
    assert (measured.num_tokens, measured.num_bytes) == (20_000, 20_000)


def test_a_mean_weighs_every_token_alike_and_bits_count_bytes():
    measured = measured_on(BYTE, [b"abc", b"d" * 9], 4)

    def loss_of(tokens_BT1, scored_BT):  # the label itself
        return tokens_BT1[:, 1:][scored_BT].double().mean().item()

    assert measured.mean(loss_of) == pytest.approx((97 + 98 + 99 + 9 * 100) / 12)
    assert measured.bits_per_byte(math.log(2)) == pytest.approx(1.0)
    halved = held_out_windows(np.array([1, 2, 3, END]), END, 4, 6)
    assert halved.bits_per_byte(math.log(2)) == pytest.approx(0.5)


def test_tokens_are_what_torch_indexes_by():
    (windows,) = measured_on(BYTE, ["é".encode()], 8).windows
    assert windows.tokens_BT1.dtype == torch.int64
    assert windows.tokens_BT1.tolist() == [[256, 0xC3, 0xA9]]
