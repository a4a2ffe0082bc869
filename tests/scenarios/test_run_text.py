"""A run with a text of its own: kept over a restart, and asked of joiners before anything else."""

from pathlib import Path

import pytest

from swarm.emulation.local_swarm import LocalSwarm
from tests.scenarios.swarms import (
    ROUND_S,
    contributes,
    has_rounds,
    read_record,
    run_folder,
    write_run,
)

pytestmark = pytest.mark.scenario

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
    swarm = LocalSwarm(tmp_path / "swarm", run_file, 1, founder_options=["--corpus", str(books)])
    with swarm:
        swarm.start()
        founder = swarm.peers[0]
        swarm.wait_until(has_rounds(1), what="a round", timeout_s=ROUND_S)
        text = read_record(founder).tip.founding.text
        assert text is not None and text.name == "books"
        line = f"This run trains on the text 'books' (digest {text.digest}, {text.tokens:,} tokens"
        assert line in founder.output()

        founder.kill()
        swarm.restart(founder, [])
        swarm.wait_until(contributes(founder), what="its contribution", timeout_s=ROUND_S)
        assert line in founder.output(), "the text that its state directory remembers"
        assert "standard library" not in founder.output()

        joiner = swarm.add(["--initial-peers", founder.join_address()])
        assert joiner.wait(ROUND_S) == REFUSED
        swarm.peers.remove(joiner)
        assert f"digest {text.digest}" in joiner.output()
        assert "this machine has the text 'standard library of Python" in joiner.output()
        assert joiner.output().count("(digest ") >= 2 and "--corpus FOLDER" in joiner.output()
        assert not (joiner.folder / "runs").exists(), "nothing of the run was kept"

        swarm.restart(joiner, ["--initial-peers", founder.join_address(), "--corpus", str(books)])
        swarm.peers.append(joiner)
        swarm.wait_until(contributes(joiner), what="its contribution", timeout_s=2 * ROUND_S)
        assert run_folder(joiner).name == run_folder(founder).name

        (books / "0.txt").write_text("another text\n" * 500)
        founder.kill()
        swarm.restart(founder, [])
        assert founder.wait(ROUND_S) == REFUSED
        swarm.peers.remove(founder)
        assert f"digest {text.digest}" in founder.output()
        joiner.kill()
