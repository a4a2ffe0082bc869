"""A run with a given text: kept over a restart, and required of joiners before anything else."""

from pathlib import Path

import pytest

from swarm.emulation.local_swarm import LocalPeer, LocalSwarm
from tests.scenarios.swarms import (
    ROUND_S,
    contributes,
    has_rounds,
    read_record,
    write_run,
)

# Two refused starts take a minute. tests/peer/text/test_run_text.py tests the comparisons.
pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]

REFUSED = 4


def write_books(folder: Path) -> Path:
    folder.mkdir()
    for number in range(8):
        lines = (f"book {number}, line {line * line}\n" for line in range(600))
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


def test_a_run_keeps_its_text_and_asks_joiners_for_it(tmp_path: Path) -> None:
    books = write_books(tmp_path / "books")
    run_file = write_run(tmp_path, ["run.rounds=100000"])
    with LocalSwarm(tmp_path / "swarm", run_file, 2) as swarm:
        with_books = ["--corpus", str(books)]
        founder = swarm.add(["--run", str(run_file), "--wait-for-peers", "2", *with_books])
        line = "This run trains on the text 'books' (digest "

        # While the run gathers its peers ...
        stranger = LocalPeer(9, tmp_path / "stranger", [], swarm.environment)
        start_and_be_refused(stranger, founder.join_address())
        swarm.add([*founder.join_options(), *with_books])
        swarm.wait_until(has_rounds(1), what="a round", timeout_s=ROUND_S)
        text = read_record(founder).tip.founding.text
        assert text is not None and text.name == "books"
        assert f"{line}{text.digest}, {text.tokens:,} tokens" in founder.output()
        assert f"digest {text.digest}" in stranger.output()

        # ... and while it trains, with its founder restarted from its state directory alone.
        founder.kill()
        swarm.restart(founder, [])
        swarm.wait_until(contributes(founder), what="its contribution", timeout_s=ROUND_S)
        assert f"{line}{text.digest}" in founder.output()
        start_and_be_refused(stranger, founder.join_address())
        assert f"digest {text.digest}" in stranger.output()


def start_and_be_refused(stranger: LocalPeer, address: str) -> None:
    """It has the standard library, reports both texts, and keeps nothing of the run."""
    stranger.arguments = ["--initial-peers", address, "--state-dir", str(stranger.folder)]
    stranger.start()
    assert stranger.wait(ROUND_S) == REFUSED
    said = stranger.output().splitlines()[-1]
    assert "the run trains on the text 'books' (digest " in said
    assert "this machine has the text 'standard library of Python" in said
    assert said.count("(digest ") == 2 and "--corpus FOLDER" in said
    assert not (stranger.folder / "runs").exists()
