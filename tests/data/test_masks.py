"""The masks of a batch by a run's settings."""

import numpy as np
import pytest
import torch

from swarm.data.masks import is_repetitive, masks_of
from tests.train.runs import tiny_run

END = 256


def test_by_default_nothing_is_masked() -> None:
    assert masks_of(torch.full((2, 9), END), tiny_run(), END) is None


def test_a_document_begins_with_the_end_of_the_one_before() -> None:
    tokens_BT1 = torch.tensor([[1, 2, END, 3, END, 9, 4, 5, END], [END, 1, 2, 3, 4, 5, 6, 7, 8]])
    found = masks_of(tokens_BT1, tiny_run(data={"attention": "document"}), END)
    assert found is not None and found.scored_BT is None
    # As the last label it begins a document only in the next window.
    assert found.starts_BT.int().tolist() == [[0, 0, 1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    with pytest.raises(AssertionError, match="has an end-of-text id"):
        masks_of(tokens_BT1, tiny_run(data={"attention": "document"}), None)


def test_a_sequence_that_repeats_itself_is_left_out_of_the_loss_as_a_whole() -> None:
    tokens_BT1 = torch.arange(3 * 101).view(3, 101)
    tokens_BT1[1, 20:84] = torch.tensor([7, 8] * 32)
    tokens_BT1[2, 20:82] = torch.tensor([7, 8] * 31)
    found = masks_of(tokens_BT1, tiny_run(data={"mask_repetition": True}), None)
    assert found is not None and found.starts_BT is None and found.scored_BT is not None
    assert found.scored_BT.shape == (3, 100)
    assert found.scored_BT.float().mean(1).tolist() == [1, 0, 1]


def test_padding_is_not_predicted_and_is_no_repetition() -> None:
    row = torch.cat([torch.tensor([END, 1, 2, END, 3]), torch.full((60,), END)])
    tokens_BT1 = torch.stack([row, torch.tensor([5] * 65)])
    both = {"attention": "document", "mask_repetition": True}
    found = masks_of(tokens_BT1, tiny_run(data=both), END)
    assert found is not None and found.scored_BT is not None
    # The first of them is scored, because it predicts the document's end.
    assert found.scored_BT[0].int().tolist() == [1] * 5 + [0] * 59
    assert not found.scored_BT[1].any()


NOISE = np.random.default_rng(0).integers(1000, 50_000, 600).astype(np.uint16)


def among_noise(stretch: list[int]) -> np.ndarray:
    return np.concatenate([NOISE[:300], np.array(stretch, dtype=np.uint16), NOISE[300:]])


@pytest.mark.parametrize("period", range(1, 14))
def test_32_times_are_too_many_and_31_are_not(period: int) -> None:
    unit = list(range(1, period + 1))
    assert is_repetitive(among_noise(unit * 32))
    assert not is_repetitive(among_noise(unit * 31 + unit[:-1]))
    assert is_repetitive(np.array(unit * 32)), "from end to end"
    broken = unit * 32
    broken[16 * period] = 999
    assert not is_repetitive(among_noise(broken))


def test_14_tokens_may_be_repeated() -> None:
    assert not is_repetitive(among_noise(list(range(1, 15)) * 40))
    assert not is_repetitive(NOISE)
    assert not is_repetitive(NOISE[:1]) and not is_repetitive(NOISE[:0])
