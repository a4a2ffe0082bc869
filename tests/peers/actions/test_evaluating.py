"""swarm-export --evaluate: scores of the written model, and their signature."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from peers.actions import exports
from peers.actions.exports import Evaluator, evaluator_of, export
from peers.command_line.options import Options
from swarm.config import RunConfig
from swarm.errors import ConfigError, NobodyReachable
from swarm.evaluation.scores import Measured, append_scores
from swarm.evaluation.tasks import TaskFailed
from swarm.export.facts import ExportFacts
from swarm.network.wire.identity import load_or_create_identity
from swarm.peer.text.agreed_model import AgreedModel
from swarm.protocol.records.records import Losses, ScoreRecord
from tests.peers.exports import invoke, on_disk


def test_an_export_is_evaluated_from_its_files(run: RunConfig, tmp_path: Path) -> None:
    manifest = on_disk(tmp_path / "state", run)
    out = tmp_path / "out"
    given = ("--state-dir", tmp_path / "state", "--out", out, "--evaluate")
    code, said = invoke(*given)
    assert code == 0, said
    # Initial weights have learned nothing: log(vocabulary) nats for each of eight bytes.
    wanted = math.log(run.model.vocab_size)
    lines = [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]
    assert [line["metric"] for line in lines] == ["bits_per_byte", "nats_per_token"]
    assert {line["manifest_digest"] for line in lines} == {manifest.digest}
    assert lines[1]["value"] == pytest.approx(wanted, abs=0.2)
    assert lines[0]["value"] == pytest.approx(lines[1]["value"] / math.log(2))
    assert f"held-out loss {lines[1]['value']:.4f} nats per token" in said
    assert "\nsample: held out => " in said
    invoke(*given)
    assert len((out / "scores.jsonl").read_text().splitlines()) == 4, "scores stay"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--tasks", "sciq"], "need --evaluate"),
        (["--publish-scores"], "need --evaluate"),
        (["--evaluate", "--publish-scores"], "needs --initial-peers"),
        (["--evaluate", "--tasks", ","], "names no task"),
    ],
)
def test_options_of_evaluation_that_contradict_each_other_are_refused_before_anything_is_done(
    given: list[str], said: str, tmp_path: Path
) -> None:
    code, output = invoke("--state-dir", tmp_path, "--out", tmp_path / "out", *given)
    assert code == ConfigError.exit_code and said in output
    assert not (tmp_path / "out").exists()


def test_scores_are_signed_by_the_key_that_is_named_else_by_the_peers(tmp_path: Path) -> None:
    mine, peers = tmp_path / "mine.key", tmp_path / "identity.key"
    given = Options(initial_peers=("/ip4/127.0.0.1/tcp/1",), state_dir=tmp_path)

    def signer(options: Options) -> str | None:
        found = evaluator_of(options, tmp_path / "s", None, is_wanted=True, publish=True)
        assert found is not None and found.publish
        return found.signer.peer_id if found.signer else None

    assert signer(given) is None, "a key that is forgotten"
    assert signer(given) is None and not peers.exists()
    known = load_or_create_identity(peers).peer_id
    assert signer(given) == known
    named = dataclasses.replace(given, identity_path=str(mine))
    assert signer(named) == load_or_create_identity(mine).peer_id != known
    (tmp_path / "settings").write_text(json.dumps({"network.identity_path": str(mine)}))
    assert signer(given) == signer(named), "the peer was given that key"


def test_the_card_says_what_the_exporter_has_measured_not_what_a_peer_says(
    found: AgreedModel, tmp_path: Path
) -> None:
    lies = Losses({0: 0.001}, {found.manifest.digest: 0.001}, 0.001)
    facts = ExportFacts(found, told=lies)
    export(facts, tmp_path)
    before = (tmp_path / "README.md").read_text()
    assert "0.0010 nats per token, 0.0000 bits per byte, by a peer's word" in before
    Evaluator(tmp_path / "scores.jsonl").evaluate(tmp_path, facts, None)
    card = (tmp_path / "README.md").read_text()
    value = json.loads((tmp_path / "swarm_export.json").read_text())["val_loss"]
    assert value == pytest.approx(math.log(found.run.model.vocab_size), abs=0.2)
    bits = f"{value / math.log(2):.4f} bits per byte"
    assert (
        f"| held-out loss | {value:.4f} nats per token, {bits}, measured by the exporter |" in card
    )
    assert f"round 0: {value:.4f}" in (tmp_path / "loss.svg").read_text()
    assert "0.0010" not in card


def test_a_task_without_data_is_told_and_the_rest_goes_on(
    found: AgreedModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_task(folder: Path, length: int, name: str, shots: int | None) -> list[Measured]:
        if name == "piqa":
            raise TaskFailed("exit code 1: OfflineModeIsEnabled\x1b[2J")
        return [Measured(name, "acc", 0.5, 10 + (shots or 0))]

    monkeypatch.setattr(exports, "run_task", run_task)
    facts = ExportFacts(found)
    export(facts, tmp_path)
    tasks = {"sciq": 0, "piqa": 0, "arc_challenge": 25}
    Evaluator(tmp_path / "scores.jsonl", tasks).evaluate(tmp_path, facts, None)
    assert "piqa: no score: exit code 1: OfflineModeIsEnabled\\x1b[2J" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [(line["task"], line["samples"]) for line in lines[2:]] == [
        ("sciq", 10),
        ("arc_challenge", 35),
    ]


def test_an_exporter_that_starts_again_publishes_the_scores_of_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Published:
        def __init__(self) -> None:
            self.records: list[ScoreRecord] = []

        def publish_scores(self, run: str, record: ScoreRecord, deadline_s: float) -> None:
            assert run == "a run" and deadline_s > 0
            if self.records:
                raise NobodyReachable("no peer keeps the scores")
            self.records.append(record)

    path, observer = tmp_path / "scores.jsonl", Published()
    given = Evaluator(path, publish=True)
    given.repeat_newest("a run", observer)  # type: ignore[arg-type]
    assert observer.records == []
    append_scores(path, "ab" * 32, 3, 12.0, [Measured("sciq", "acc", 0.5, 10)])
    Evaluator(path).repeat_newest("a run", observer)  # type: ignore[arg-type]
    assert observer.records == [], "nobody asked for it"
    given.repeat_newest("a run", observer)  # type: ignore[arg-type]
    assert [score.value for score in observer.records[0].scores] == [0.5]
    given.repeat_newest("a run", observer)  # type: ignore[arg-type]
    assert "were not published: no peer keeps the scores" in capsys.readouterr().out
