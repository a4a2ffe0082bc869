"""Three honest peers with timed steps, and a fourth founder that runs another program."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from swarm.emulation.controls import FOLDER_VARIABLE, ControlFolder, Controls
from swarm.emulation.local_swarm import LocalSwarm
from tests.scenarios.swarms import write_run

LINE = ["--max-upload", "100mbit"]
"""Equal lines. On loopback the measured rates are some Gbit/s, and the peer with the highest rate
averages other peers' units too (balanced uploads). A peer that averages nothing does not notice
withheld values (withholding exclusion)."""


@contextmanager
def crew_with(
    program: str, folder: Path, settings: Sequence[str], step_s: float
) -> Iterator[tuple[LocalSwarm, Path]]:
    """The swarm, the liar last, and its folder of controls.

    Args:
        program: module that the fourth peer runs.
        folder: a new one.
        settings: of the run.
        step_s: duration of each local step.
    """
    run_file = write_run(folder, settings)
    controls = ControlFolder(folder / "controls")
    controls.create()
    controls.tell_all(Controls(step_s=step_s))
    with LocalSwarm(
        folder / "swarm",
        run_file,
        3,
        options=LINE,
        founder_options=["--wait-for-peers", "4"],
        program="peers.emulated",
    ) as swarm:
        swarm.environment = {**swarm.environment, FOLDER_VARIABLE: str(controls.path)}
        swarm.start()
        swarm.program = program
        swarm.add(swarm.peers[0].join_options())
        yield swarm, controls.path
