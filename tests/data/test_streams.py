import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from swarm.data.streams import permute, stream_start, stream_windows

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
    # Neighbours must not stay together: a step of 1 happens twice on average, either way.
    assert np.count_nonzero(np.abs(np.diff(first)) == 1) < 12


def test_the_first_streams_start_where_van_der_corput_says():
    starts = [stream_start(index, 1024) for index in range(8)]
    assert starts == [0, 512, 256, 768, 128, 640, 384, 896]


@given(index=st.integers(0, 2**70), num_windows=st.integers(1, 10**9))
def test_a_stream_starts_inside_the_corpus(index, num_windows):
    assert 0 <= stream_start(index, num_windows) < num_windows


@pytest.mark.parametrize("num_peers", [1, 2, 3, 4, 8, 16])
def test_streams_share_no_window_until_the_corpus_is_used_up(num_peers):
    circle = 2 ** (num_peers - 1).bit_length()
    samples = range(NUM_WINDOWS // circle)
    seen = np.concatenate([stream_windows(7, i, samples, NUM_WINDOWS) for i in range(num_peers)])
    assert len(np.unique(seen)) == len(seen)
    if num_peers == circle:
        # The epoch: all but the rounding of W / N is used, once.
        assert len(seen) > NUM_WINDOWS - num_peers


def test_four_peers_share_no_window_in_the_demo():
    """Eight rounds of 50 steps with 8 sequences."""
    seen = np.concatenate([stream_windows(0, i, range(3200), NUM_WINDOWS) for i in range(4)])
    assert len(np.unique(seen)) == 4 * 3200


def test_a_stream_meets_every_window_once_per_lap_and_then_in_another_order():
    first = stream_windows(3, 5, range(1000), 1000)
    second = stream_windows(3, 5, range(1000, 2000), 1000)
    assert sorted(first) == sorted(second) == list(range(1000))
    assert np.count_nonzero(first == second) < 10


@given(cut=st.integers(0, 300), start=st.integers(0, 5000), index=st.integers(0, 2**64 - 1))
def test_windows_depend_on_the_sample_alone_not_on_how_they_are_asked_for(cut, start, index):
    whole = stream_windows(1, index, range(start, start + 300), 777)
    left = stream_windows(1, index, range(start, start + cut), 777)
    right = stream_windows(1, index, range(start + cut, start + 300), 777)
    assert np.array_equal(whole, np.concatenate([left, right]))


def test_another_seed_is_another_order():
    samples = range(1000)
    first, second = (stream_windows(seed, 0, samples, NUM_WINDOWS) for seed in (0, 1))
    assert np.count_nonzero(first == second) < 5


def test_the_order_never_changes():
    """Peers of one run may have different versions of this package."""
    assert stream_windows(42, 3, range(5), 1000).tolist() == [590, 989, 538, 705, 932]
