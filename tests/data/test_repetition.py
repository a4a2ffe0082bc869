"""Which texts repeat a few tokens over and over: 1 to 13 tokens, 32 times in a row."""

import numpy as np
import pytest

from swarm.data.repetition import is_repetitive

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
