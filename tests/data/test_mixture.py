"""Several folders as one stream of documents: shares of bytes, alike on every machine."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from peers.data import main
from swarm.config import RunConfig, parse_config
from swarm.data.corpus import is_held_out
from swarm.data.mixture import Mixture, open_mixture
from swarm.data.tally import Tally
from swarm.data.tokenise import BYTE, document_tokens
from swarm.errors import ConfigError, DataError, TextMismatch
from swarm.peer.run_text import RunText
from tests.scenarios.swarms import EXACT

SHARES = (("web", 0.75), ("code", 0.25))
SETTING = 'data.mixture=[["web", 0.75], ["code", 0.25]]'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, count in (("web", 400), ("code", 400), ("other", 3)):
        (tmp_path / "text" / name).mkdir(parents=True)
        for number in range(count):
            text = f"{name} {number} " * (1 + number * 7 % 11)
            (tmp_path / "text" / name / f"{number:03}.txt").write_text(text)
    return tmp_path / "text"


def run_of(*settings: str) -> RunConfig:
    return parse_config(RunConfig, EXACT, source="test", overrides=settings)


def invoke(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    return result.exit_code, result.output


def from_web(documents: list[bytes]) -> float:
    return sum(len(d) for d in documents if d.startswith(b"web")) / sum(map(len, documents))


def test_every_stretch_has_the_shares_and_nothing_comes_twice(folder: Path) -> None:
    tally = Tally()
    found = list(open_mixture(str(folder), SHARES).documents(tally))
    assert len(set(found)) == len(found) and not any(d.startswith(b"other") for d in found)
    for start in range(0, len(found) - 100, 100):
        assert from_web(found[start : start + 100]) == pytest.approx(0.75, abs=0.04)
    assert sum(d.startswith(b"web") for d in found) == 400, "it ends with the first that ends"
    assert tally.named == ["code: not read to its end, since web ended first"]
    assert tally.files < 600
    for name in (b"web", b"code"):
        of_it = [d for d in found if d.startswith(name)]
        assert of_it == sorted(of_it, key=lambda d: int(d.split()[1])), "in the order of files"


def test_its_order_is_a_function_of_folders_and_weights(folder: Path) -> None:
    def order(*shares: tuple[str, float]) -> list[bytes]:
        return list(open_mixture(str(folder), shares).documents())

    assert order(*SHARES) == order(("web", 3.0), ("code", 1.0))
    assert order(*SHARES) != order(("web", 0.25), ("code", 0.75))
    prints = {open_mixture(str(folder), s).fingerprint() for s in (SHARES, SHARES[::-1])}
    assert len(prints) == 2
    (folder / "web" / "000.txt").write_text("changed")
    assert open_mixture(str(folder), SHARES).fingerprint() not in prints


def test_a_run_mixes_its_text_and_joiners_need_the_same(folder: Path, tmp_path: Path) -> None:
    run, plain = run_of(SETTING), run_of()
    given = RunText(str(folder), tmp_path / "cache", print).found(run, BYTE)
    mixed = open_mixture(str(folder), SHARES)
    tokens = [document_tokens(each) for each in mixed.documents() if not is_held_out(each)]
    joiner = RunText(str(folder), tmp_path / "other", print)
    joiner.require(run, BYTE, given.common, None)
    assert np.array_equal(np.concatenate(joiner.shards.arrays), np.concatenate(tokens))
    (folder / "code" / "000.txt").write_text("another text")
    with pytest.raises(TextMismatch):
        RunText(str(folder), tmp_path / "other", print).require(run, BYTE, given.common, None)
    assert given.common is not None
    assert RunText(str(folder), tmp_path / "cache", print).found(plain, BYTE).common != given.common


def test_shards_are_mixed_as_the_run_file_says_or_refused(folder: Path, tmp_path: Path) -> None:
    run_file, out = tmp_path / "run.toml", tmp_path / "shards"
    share = 'mixture = [["web", 0.75], ["code", 0.25]]\nsequence_length'
    run_file.write_text(EXACT.replace("sequence_length", share, 1))
    code, said = invoke("tokenize", "--run", run_file, "--corpus", folder, "--out", out)
    assert code == 0, said
    code, said = invoke("info", out, "--json")
    assert json.loads(said)["mixture"] == [["web", 0.75], ["code", 0.25]]
    mixed = RunText(str(out), tmp_path / "cache", print).found(run_of(SETTING), BYTE)
    same = RunText(str(folder), tmp_path / "cache", print).found(run_of(SETTING), BYTE)
    assert mixed.common is not None and same.common is not None
    assert mixed.common.digest == same.common.digest and mixed.held_out == same.held_out
    with pytest.raises(DataError, match=r"'web', 0.75.*the run has \[\].*tokenize --run FILE"):
        RunText(str(out), tmp_path / "cache", print).found(run_of(), BYTE)


def test_what_cannot_be_mixed_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"web, code, and none was named.*--corpus DIR"):
        RunText(None, tmp_path / "cache", print).found(run_of(SETTING), BYTE)
    with pytest.raises(DataError, match=r"nowhere: no such folder"):
        open_mixture(str(folder), [("nowhere", 1.0)])
    with pytest.raises(ConfigError, match="names a folder twice"):
        run_of('data.mixture=[["web", 0.5], ["web", 0.5]]')
    for wrong in ('["web", 0.0]', '["../web", 1.0]', '["/etc", 1.0]', '["web"]', '[".", 1.0]'):
        with pytest.raises(ConfigError, match=r"data\.mixture"):
            run_of(f"data.mixture=[{wrong}]")
    assert isinstance(open_mixture(str(folder), [("web", 1.0)]), Mixture)
