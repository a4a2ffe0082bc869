"""swarm-doctor refuses exactly what swarm-peer would, by its state directory too."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from peers.actions import examination
from peers.actions.examination import Around, Asked, wanted_of
from peers.command_line.option_values import as_toml
from peers.command_line.options import Options
from peers.doctor import main
from swarm.config import PeerConfig, RunConfig, parse_config
from swarm.network.runs.signed_invitations import credential_for, invite
from swarm.network.wire.identity import load_or_create_identity
from swarm.peer.machine.state_directory import StateDirectory, keep
from swarm.peer.start.quota import count_of
from swarm.protocol.records.records import RunState
from swarm.protocol.values.invitation import as_text
from tests.peer.start.test_founding import Founder
from tests.protocol.round_pump import found, make_rules
from tests.train.runs import tiny_run

DEAD = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEhqPMwUVi6Sr3ThFZAsoGfBTXdv6PxBByKg8ZdCrNgTf"
RUN_ID = "tiny-0123456789abcdef"
RUN = tiny_run()
DEMANDING = tiny_run(run={"initial": "given"}, data={"mode": "own", "tokenizer": "file"})
"""A run whose founder must name text, tokenizer and weights."""
NEEDED = ("trains on its own text", "no tokenizer was named", "no checkpoint was named")


def examined(folder: Path, *args: str | Path) -> tuple[int, str]:
    """Exit code, and the finding about the options, "" if there is none."""
    given = ["--state-dir", str(folder), "--json", *map(str, args)]
    result = CliRunner().invoke(main, given, catch_exceptions=False)
    findings = json.loads(result.stdout)["findings"]
    return result.exit_code, next((f["text"] for f in findings if f["topic"] == "options"), "")


def run_file(folder: Path, run: RunConfig) -> Path:
    path = folder / "run.toml"
    path.write_text(as_toml(run))
    return path


def text_in(folder: Path) -> str:
    folder.mkdir()
    (folder / "text.txt").write_text("a text of one's own")
    return str(folder)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state directory of a peer in an unfinished run."""
    load_or_create_identity(tmp_path / "state" / "identity.key")
    founder = Founder(tmp_path / "state")
    founder.found(run=RUN)
    founder.state.close()
    return tmp_path / "state"


def runs_of(state: Path) -> tuple[str, ...]:
    return StateDirectory.unlocked(state).run_ids


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- a run on disk


def test_who_resumes_needs_nothing_that_a_founder_gives(state: Path, tmp_path: Path) -> None:
    directory = StateDirectory.unlocked(state).run(*runs_of(state))
    directory.write_config(DEMANDING)
    directory.write_text_folder(text_in(tmp_path / "text"))
    file = run_file(tmp_path, DEMANDING)
    assert examined(state, "--run", file) == examined(state) == (3, "")
    code, why = examined(tmp_path / "new", "--run", file)
    assert code == 1 and all(what in why for what in NEEDED)


def test_who_resumes_needs_the_text_that_was_there(state: Path, tmp_path: Path) -> None:
    directory = StateDirectory.unlocked(state).run(*runs_of(state))
    directory.write_text_folder(str(tmp_path / "moved"))
    code, why = examined(state)
    assert code == 1 and f"{tmp_path / 'moved'}: no such folder" in why
    assert examined(state, "--corpus", text_in(tmp_path / "text")) == (3, "")


def test_a_run_is_not_founded_in_place_of_an_unfinished_one(state: Path, tmp_path: Path) -> None:
    file = run_file(tmp_path, tiny_run(run={"rounds": 12}))
    code, why = examined(state, "--run", file)
    assert code == 1 and "is not finished" in why and "run.rounds: asked 12, the run has 4" in why
    assert examined(state, "--run", file, "--new-run") == (3, "")


def test_a_key_that_is_missing_beside_its_runs_is_a_fault(state: Path) -> None:
    assert examined(state) == (3, "")
    (state / "identity.key").unlink()
    code, why = examined(state)
    assert code == 1 and f"{state / 'identity.key'} is missing" in why
    assert not (state / "identity.key").exists()


def test_a_run_that_is_not_on_disk_is_a_fault(state: Path) -> None:
    code, why = examined(state, "--run-id", RUN_ID)
    assert code == 1 and f"has no run {RUN_ID}" in why


# ---------------------------------------------------------------- kept settings


def test_a_quota_of_an_earlier_start_is_looked_at(state: Path) -> None:
    quota = parse_config(PeerConfig, "", source="x", overrides=["network.data_quota_gb=1.0"])
    keep(quota, state / "settings")
    assert examined(state) == (3, "")
    count = count_of(StateDirectory.unlocked(state))
    count.add(2 * 10**9, time.time())
    count.write()
    code, why = examined(state)
    assert code == 1 and "2 of 1 GB" in why
    assert examined(state, "--data-quota", "5GB") == (3, "")


@pytest.mark.parametrize("is_running", [True, False])
def test_nothing_of_the_state_directory_is_changed(state: Path, is_running: bool) -> None:
    keep(parse_config(PeerConfig, 'peer.name = "a"', source="x"), state / "settings")
    before = contents(state)
    running = StateDirectory(state) if is_running else None
    code, why = examined(state, "--name", "b", "--client-mode", "--rounds", "9")
    if running:
        running.close()
    assert (code, "run.rounds: asked 9, the run has 4" in why) == (1, True)
    assert contents(state) == before


# ---------------------------------------------------------------- a run of others


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"mode": "own"}, "every peer trains on its own text"),
        ({"mixture": [["code", 0.5], ["prose", 0.5]]}, "--corpus"),
    ],
)
def test_a_joiner_needs_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], why: str
) -> None:
    around = Around(run=tiny_run(data=data), run_id=RUN_ID)
    monkeypatch.setattr(examination, "_look_around", lambda *_: around)
    state, text = StateDirectory.unlocked(tmp_path / "state"), tmp_path / "text"
    code, said = examined(state.path, "--initial-peers", DEAD)
    assert code == 1 and why in said
    for kind in ("code", "prose"):
        (text / kind).mkdir(parents=True)
        (text / kind / "text.txt").write_text("a text")
    assert examined(state.path, "--initial-peers", DEAD, "--corpus", text) == (3, "")
    state.run(RUN_ID).path.mkdir(parents=True)
    state.run(RUN_ID).write_text_folder(str(text))
    assert examined(state.path, "--initial-peers", DEAD) == (3, ""), "it was named before"


def admitted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, run_id: str = RUN_ID, **given: object
) -> tuple[str, ...]:
    """Refusals by a run for invited peers, if this peer is not a member."""
    anchor = load_or_create_identity(folder.parent / "anchor.key").peer_id
    run = tiny_run(run={"admission": "invited"})
    record = SimpleNamespace(run=run_id, state=RunState.RUNNING)
    opened = SimpleNamespace(run=run, announced=SimpleNamespace(record=record))
    tip = replace(found(make_rules(), [anchor, anchor]), run=run_id, round=4, height=4)
    answers = {
        "find_run": opened, "present_peers": {}, "measured_rates": (None, None),
        "newest_tip": SimpleNamespace(record=SimpleNamespace(tip=tip)),
    }  # fmt: skip
    for name, answer in answers.items():

        async def answering(*_: object, _answer: object = answer, **__: object) -> object:
            return _answer

        monkeypatch.setattr(examination, name, answering)
    monkeypatch.setattr(examination, "whom_to_ask", lambda *_: [])
    monkeypatch.setattr(examination, "verdict_for", lambda *_: None)
    options, state = Options(state_dir=folder, **given), StateDirectory.unlocked(folder)  # type: ignore[arg-type]
    network = PeerConfig().network.model_copy(update={"initial_peers": (DEAD,)})
    asked = Asked.of(options, network, wanted_of(options), state)
    node: Any = SimpleNamespace(peer_id="me")
    around, _ = asyncio.run(examination._look_at_run(node, Around(), asked))
    return around.refused


def test_a_folder_that_a_refused_start_has_left_is_no_invitation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    anchor = load_or_create_identity(tmp_path / "anchor.key")
    directory = StateDirectory.unlocked(folder).run(RUN_ID)
    directory.path.mkdir(parents=True)
    (refused,) = admitted(folder, monkeypatch)
    assert "only peers that are invited" in refused
    private = invite(anchor, RUN_ID, uses=1, last_round=9)
    assert admitted(folder, monkeypatch, invitation=as_text(private)) == ()
    assert admitted(folder, monkeypatch) == (refused,), "nothing is kept"
    directory.write_credential(credential_for(private, anchor))
    assert admitted(folder, monkeypatch) == (), "a killed join continues with it"


def test_who_has_a_record_comes_back_without_an_invitation(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = StateDirectory.unlocked(state).run(*runs_of(state))
    assert admitted(state, monkeypatch, directory.path.name) == ()
    directory.record_path.unlink()
    assert "only peers that are invited" in admitted(state, monkeypatch, directory.path.name)[0]


# ---------------------------------------------------------------- another user's directory


def deny(monkeypatch: pytest.MonkeyPatch, look: str, hidden: Path) -> None:
    looks = getattr(Path, look)

    def denied(path: Path, **options: bool) -> object:
        if hidden in (path, *path.parents):
            raise PermissionError(13, "Permission denied", str(path))
        return looks(path, **options)

    monkeypatch.setattr(Path, look, denied)


def test_another_users_key_is_a_finding(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deny(monkeypatch, "exists", state / "identity.key")
    assert examined(state) == (1, f"{state / 'identity.key'}: Permission denied")


def test_another_users_directory_is_a_finding(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deny(monkeypatch, "stat", state)
    code, why = examined(state, "--run", run_file(tmp_path, RUN))
    assert code == 1 and f"{state / 'identity.key'}: Permission denied" in why
