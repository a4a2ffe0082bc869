"""Exports on the hub: the uploaded files, with a client that sends nothing."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from peers.export import main
from swarm.errors import ConfigError, SwarmError
from swarm.export.facts import ExportFacts
from swarm.export.hub import Hub, open_hub
from swarm.network.blobs.blob_store import BlobStore
from tests.export.models import after, facts_of, found, toy_run

huggingface_hub = pytest.importorskip("huggingface_hub", reason="of the extra hf")
utils = pytest.importorskip("huggingface_hub.utils", reason="of the extra hf")


class Client:
    """Records the uploads."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error = error

    def create_repo(self, repo_id: str, *, exist_ok: bool) -> None:
        self.calls.append(("create", {"repo_id": repo_id, "exist_ok": exist_ok}))

    def upload_folder(self, **sent: Any) -> None:
        if self.error:
            raise self.error
        self.calls.append(("upload", sent))


@pytest.fixture(scope="module")
def facts() -> ExportFacts:
    run, store = toy_run(), BlobStore()
    return facts_of(run, after(store, run, found(store, run), 3), store)


def test_an_export_is_one_commit_that_names_its_round(facts: ExportFacts, tmp_path: Path) -> None:
    client = Client()
    Hub(client, "me/model").push(tmp_path, facts)
    digest = facts.model.manifest.digest[:12]
    assert client.calls == [
        ("create", {"repo_id": "me/model", "exist_ok": True}),
        (
            "upload",
            {
                "repo_id": "me/model",
                "folder_path": tmp_path,
                "commit_message": f"{facts.run_id}, round 3 (manifest {digest})",
                "ignore_patterns": [".*", "*/.*"],
                "delete_patterns": ["model*.safetensors", "model.safetensors.index.json"],
            },
        ),
    ]


def test_nothing_hidden_is_sent(facts: ExportFacts, tmp_path: Path) -> None:
    kept = {"config.json", "lm_eval/swarm_held_out.yaml"}
    for name in (*kept, ".fetching-x/packs/0", ".lock", "lm_eval/.cache/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    client = Client()
    Hub(client, "me/model").push(tmp_path, facts)
    found = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    patterns = client.calls[-1][1].get("ignore_patterns")
    sent = utils.filter_repo_objects(found, ignore_patterns=patterns)
    assert {path.as_posix() for path in sent} == kept


def test_a_hubs_refusal_does_not_end_the_export(facts: ExportFacts, tmp_path: Path) -> None:
    with pytest.raises(SwarmError, match=r"not pushed to me/model: 403 .*hf upload"):
        Hub(Client(OSError("403 Forbidden")), "me/model").push(tmp_path, facts)


def test_without_a_token_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"no token of the hub \(log in with hf auth login"):
        open_hub("me/model")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    assert open_hub("me/model").repo == "me/model"


def test_swarm_export_asks_for_the_token_before_it_looks_for_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    options = ["--state-dir", tmp_path / "no", "--out", tmp_path / "out", "--push-to-hub", "me/x"]
    result = CliRunner().invoke(main, [str(each) for each in options])
    assert result.exit_code == ConfigError.exit_code and "hf auth login" in result.output


def test_the_hubs_client_takes_what_it_is_given(tmp_path: Path, facts: ExportFacts) -> None:
    client = Client()
    Hub(client, "me/model").push(tmp_path, facts)
    methods = {"create": "create_repo", "upload": "upload_folder"}
    for name, given in client.calls:
        method = getattr(huggingface_hub.HfApi, methods[name])
        assert given.keys() <= inspect.signature(method).parameters.keys()
