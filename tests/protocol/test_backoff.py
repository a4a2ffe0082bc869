from swarm.protocol.backoff import backoff_s


def test_a_rest_doubles_with_each_failure_up_to_its_limit() -> None:
    assert [backoff_s(n, 0.5, 3.0) for n in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_any_number_of_failures_has_a_rest() -> None:
    assert backoff_s(10**6, 0.5, 15.0) == 15.0
