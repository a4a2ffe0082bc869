"""Virtual time as threads and tasks see it, in a world without a peer."""

import asyncio
import threading
import time

import pytest

from swarm.background import SupervisedThread
from swarm.emulation.longevity import kernel
from swarm.emulation.longevity.kernel import Stuck, VirtualLoopThread
from swarm.emulation.longevity.month import world
from swarm.emulation.longevity.virtual_ports import reached_past


def test_weeks_of_sleep_take_no_time_and_threads_wake_in_the_order_of_their_timers() -> None:
    order: list[tuple[str, float]] = []
    with world(1) as months:

        def sleeper(name: str, days: float) -> None:
            months.threads.sleep(days * 86_400)
            order.append((name, months.now_s / 86_400))

        def main() -> None:
            threads = [
                kernel.VirtualThread(target=sleeper, args=(name, days))
                for name, days in (("late", 20.0), ("early", 3.0))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not any(thread.is_alive() for thread in threads)

        began_s = time.monotonic()
        months.run(main)
    assert order == [("early", 3.0), ("late", 20.0)]
    assert time.monotonic() - began_s < 30


def test_a_wait_ends_with_the_event_or_with_its_time() -> None:
    with world(1) as months:
        event = kernel.VirtualEvent()

        def main() -> None:
            assert not event.wait(5.0) and months.now_s == pytest.approx(5.0)
            kernel.VirtualTimer(7.0, event.set).start()
            assert event.wait(100.0) and months.now_s == pytest.approx(12.0)

        months.run(main)


def test_a_coroutine_runs_for_a_thread_and_is_cancelled_after_its_deadline() -> None:
    with world(1) as months:
        cancelled: list[float] = []

        async def sleeps(seconds: float) -> str:
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                cancelled.append(months.now_s)
                raise
            return "done"

        def main() -> None:
            network = VirtualLoopThread("network")
            assert network.run(sleeps(3.0), 10.0) == "done"
            with pytest.raises(TimeoutError, match="10 s"):
                network.run(sleeps(30.0), 10.0)

        months.run(main)
    assert cancelled == [pytest.approx(13.0)]


def test_modules_of_the_peer_see_virtual_time_and_threads_and_real_ones_afterwards() -> None:
    bodies: list[float] = []
    with world(1) as months:

        def body() -> None:
            bodies.append(months.now_s)
            if len(bodies) < 3:
                raise MemoryError

        def main() -> None:
            thread = SupervisedThread("body", body)
            thread.start()
            months.threads.sleep(60.0)
            assert not thread.is_alive

        months.run(main)
    assert len(bodies) == 3 and 0 < bodies[1] < bodies[2] < 60
    real = SupervisedThread("real", lambda: bodies.append(threading.active_count()))
    real.start()
    assert real.stop(10.0) and len(bodies) == 4


def test_what_waits_for_nothing_is_told_apart_from_what_waits() -> None:
    with world(1) as months, pytest.raises(Stuck):
        months.run(lambda: kernel.VirtualEvent().wait())


def test_the_protocol_reaches_past_no_port() -> None:
    found = reached_past()
    assert found and not [name for name in found if name.startswith("swarm.protocol")]
