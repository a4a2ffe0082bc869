import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from swarm.data.streams import permute, samples_at, windows_of

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


def test_samples_are_counted_through_the_stretches_in_their_order():
    stretches = ((50, 53), (7, 8), (60, 64))
    assert samples_at(stretches, 0, 8).tolist() == [50, 51, 52, 7, 60, 61, 62, 63]
    assert samples_at(stretches, 2, 3).tolist() == [52, 7, 60]
    assert samples_at(stretches, 6, 9).tolist() == [62, 63]
    assert samples_at(stretches, 8, 1).tolist() == samples_at((), 0, 4).tolist() == []


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
