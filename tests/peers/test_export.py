"""swarm-export writes the agreed values."""

import contextlib
import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import transformers

from peers.actions import exports
from peers.actions.exports import export
from peers.command_line.options import Options
from swarm.config import RunConfig
from swarm.data.tokenizer_file import train_tokenizer
from swarm.errors import ConfigError, CorruptState, NobodyReachable, StateError, StateLocked
from swarm.evaluation.tasks import command
from swarm.export.facts import ExportFacts, Form
from swarm.export.manager import write_export
from swarm.model.initial_weights import initial_tensors
from swarm.model.pretrained import TensorFiles
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.rounds.record_file import RecordFile
from swarm.peer.machine.state_directory import StateDirectory
from swarm.peer.text.agreed_model import AgreedModel, named_tensors
from swarm.protocol.messages.events import Record
from swarm.protocol.records.records import Losses
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.manifest import Manifest
from swarm.protocol.values.texts import TokenizerFile
from tests.blobs import blob_of
from tests.layout_places import places_of
from tests.peers.exports import invoke, on_disk


def test_every_tensor_comes_once_with_its_agreed_value(
    found: AgreedModel, run: RunConfig, layout: Layout
) -> None:
    named = list(named_tensors(layout, found.manifest, found.store))
    assert sorted(name for name, _ in named) == sorted(layout.shapes)
    wanted = initial_tensors(run, layout.shapes)
    for name, tensor in named:
        codec = layout.by_unit[places_of(layout)[name][0][0]].codec
        dtype = torch.float32 if codec == "fp32" else torch.bfloat16
        assert tensor.dtype == dtype and torch.equal(tensor, wanted[name].to(dtype)), name


def test_few_tensors_wait_for_their_other_parts(
    found: AgreedModel, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first tensor is cut into several parts. It is freed after its last part, so that memory
    # never holds more than one part's tensors.
    reads: set[str] = set()
    read = BlobStore.read

    def noted(store: BlobStore, digest: str, offset: int, length: int) -> memoryview | None:
        reads.add(digest)
        return read(store, digest, offset, length)

    monkeypatch.setattr(BlobStore, "read", noted)
    first, _ = next(named_tensors(layout, found.manifest, found.store))
    assert len(reads) == len(places_of(layout)[first]) > 2


def test_a_missing_blob_is_named(found: AgreedModel, layout: Layout) -> None:
    gone = found.manifest.entries["expert.3"].digest
    found.store.collect({d for d in found.store.digests() if d != gone})
    with pytest.raises(CorruptState, match=r"expert\.3 in round 0 is missing"):
        list(named_tensors(layout, found.manifest, found.store))


class FakeSource:
    """Peers of a run with one state."""

    agreed: AgreedModel

    def __init__(self, observer: None, store: BlobStore, run_id: str | None) -> None:
        self.store = store

    def newest(self, least_round: int) -> Manifest:
        return self.agreed.manifest


def test_what_was_fetched_is_removed_before_an_export_is_published(
    found: AgreedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Source(FakeSource):
        agreed = found

        def bring(self, manifest: Manifest, form: Form) -> ExportFacts:
            self.store.put(b"a value")
            assert list(out.glob(".fetching/packs/*"))
            return ExportFacts(found, form)

    def published(folder: Path, facts: ExportFacts) -> None:
        assert not list(folder.glob(".*"))
        told.append(facts.model.manifest)

    out, told = tmp_path / "out", list[Manifest]()
    monkeypatch.setattr(exports, "FromPeers", Source)
    monkeypatch.setattr(exports, "_observing", lambda *_: contextlib.nullcontext())
    exports.export_newest(Options(initial_peers=("x",)), out, None, Form(), published=published)
    assert told == [found.manifest]


def test_an_export_that_was_killed_goes_on_with_what_had_come(
    found: AgreedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = found.manifest.entries["shared.0"].digest

    class Source(FakeSource):
        agreed = found

        def bring(self, manifest: Manifest, form: Form) -> ExportFacts:
            here.append(self.store.has(kept))
            with pytest.raises(StateLocked, match="another swarm-export writes into it"):
                exports.export_newest(Options(initial_peers=("x",)), out, None, Form())
            if not here[-1]:
                old = self.store.put(b"of a round before")
                self.store.put(found.store.get(kept) or b"", kept)
                self.store.sync([kept, old])
                raise NobodyReachable("it ends")
            assert self.store.digests() == [kept]
            return ExportFacts(found, form)

    out, here = tmp_path / "out", list[bool]()
    monkeypatch.setattr(exports, "FromPeers", Source)
    monkeypatch.setattr(exports, "_observing", lambda *_: contextlib.nullcontext())
    with pytest.raises(NobodyReachable):
        exports.export_newest(Options(initial_peers=("x",)), out, None, Form())
    exports.export_newest(Options(initial_peers=("x",)), out, None, Form())
    assert here == [False, True] and not list(out.glob(".*"))


def test_an_export_holds_model_configuration_and_tokenizer(
    found: AgreedModel,
    run: RunConfig,
    layout: Layout,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    export(ExportFacts(found), tmp_path / "out")
    folder = tmp_path / "out"
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "lm_eval",
        "model.safetensors",
        "swarm_export.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == run.data.sequence_length
    assert config["eos_token_id"] == 256
    tensors = dict(TensorFiles(folder))
    for unit in layout.units:
        blob = found.store.get(found.manifest.entries[unit.unit].digest)
        assert blob is not None and blob_of(unit, tensors) == bytes(blob)
    said = capsys.readouterr().out
    assert command(folder, run.data.sequence_length) in said
    assert (folder / "lm_eval" / "swarm_held_out.jsonl").read_text() == '{"text": "held out"}\n'


def test_an_export_has_the_tokenizer_of_its_run(
    found: AgreedModel, layout: Layout, tmp_path: Path
) -> None:
    made = train_tokenizer([b"a few words, and a few more"] * 9, 260)
    used = TokenizerFile(found.store.put(made.content), len(made.content), made.end_of_text, 9)
    founding = dataclasses.replace(found.manifest.founding, tokenizer=used)
    manifest = dataclasses.replace(found.manifest, founding=founding)
    export(ExportFacts(dataclasses.replace(found, manifest=manifest)), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == made.end_of_text
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "a few <|endoftext|> words"
    (tokens,) = made.encoded([text.encode()])
    assert not (tmp_path / "lm_eval").exists(), "these held-out tokens are not this tokenizer's"
    assert loaded(text)["input_ids"] == tokens[:-1].tolist()
    assert loaded.eos_token_id == made.end_of_text
    found.store.collect({d for d in found.store.digests() if d != used.digest})
    with pytest.raises(CorruptState, match="tokenizer is missing"):
        export(ExportFacts(dataclasses.replace(found, manifest=manifest)), tmp_path)


def test_a_stopped_peers_directory_is_exported(run: RunConfig, tmp_path: Path) -> None:
    manifest = on_disk(tmp_path / "state", run)
    code, said = invoke("--state-dir", tmp_path / "state", "--out", tmp_path / "out")
    assert code == 0, said
    assert f"exported round 0 (manifest {manifest.digest[:12]})" in said
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_running_peers_directory_is_left_alone(run: RunConfig, tmp_path: Path) -> None:
    on_disk(tmp_path / "state", run)
    holder = StateDirectory(tmp_path / "state")
    code, said = invoke("--state-dir", tmp_path / "state", "--out", tmp_path / "out")
    holder.close()
    assert code == StateError.exit_code
    assert "its peer is running (export with --initial-peers ADDRESS)" in said
    assert not (tmp_path / "out").exists()


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    code, said = invoke("--state-dir", tmp_path / "no", "--out", tmp_path / "out")
    assert code == StateError.exit_code and "no such state directory" in said
    assert not (tmp_path / "no").exists()


def test_a_directory_without_a_run_is_said_to_have_none(tmp_path: Path) -> None:
    StateDirectory(tmp_path / "state").close()
    where = ("--state-dir", tmp_path / "state", "--out", tmp_path / "out")
    code, said = invoke(*where)
    assert code == StateError.exit_code and "there is no run in it" in said
    code, said = invoke(*where, "--run-id", "x-0123456789abcdef")
    assert code == StateError.exit_code and "no state of x-" in said


def test_the_newest_of_two_manifests_is_what_the_record_names(
    run: RunConfig, layout: Layout, tmp_path: Path
) -> None:
    manifest = on_disk(tmp_path / "state", run)
    state = StateDirectory(tmp_path / "state")
    directory = state.run("demo-0123456789abcdef")
    store = BlobStore(directory.path)
    unit = layout.by_unit["expert.0"]
    ones = {piece.name: torch.ones(layout.shapes[piece.name]) for piece in unit.slices}
    digest = store.put(blob_of(unit, ones))
    entry = dataclasses.replace(manifest.entries["expert.0"], digest=digest, version=1)
    newer = dataclasses.replace(
        manifest, run="demo-0123456789abcdef", height=1, round=1, parent=manifest.digest,
        entries={**manifest.entries, "expert.0": entry},
    )  # fmt: skip
    store.sync(store.digests())
    RecordFile(directory.record_path).write(Record(newer, None, manifest))
    state.close()
    assert invoke("--state-dir", tmp_path / "state", "--out", tmp_path / "out")[0] == 0
    tensors = dict(TensorFiles(tmp_path / "out"))
    assert all(bool((tensors[piece.name] == 1).all()) for piece in unit.slices)


def test_a_model_in_bf16_says_so_and_loads_as_such(found: AgreedModel, tmp_path: Path) -> None:
    write_export(tmp_path, ExportFacts(found, Form("bfloat16", max_shard_bytes=30_000)))
    assert {tensor.dtype for _, tensor in TensorFiles(tmp_path).items()} == {torch.bfloat16}
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == 256


def test_the_card_tells_where_a_model_comes_from_and_shows_its_losses(
    found: AgreedModel, tmp_path: Path
) -> None:
    hostile = "](http://x) <script>|`"
    manifest = dataclasses.replace(
        found.manifest, run="demo-0123456789abcdef", round=3, tokens=123_456,
        contributors=("QmA", "QmB"), work={"QmA": 100, "QmB": 1000},
    )  # fmt: skip
    losses = Losses({1: 4.5, 3: 2.75, 4: 2.0}, {manifest.digest: 2.25}, 2.0)
    model = dataclasses.replace(found, manifest=manifest)
    facts = ExportFacts(model, Form(license="apache-2.0"), losses, {"QmB": hostile})
    write_export(tmp_path, facts)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith('---\nlicense: "apache-2.0"\n')
    for words in (
        "| run | `demo-0123456789abcdef` |",
        f"| manifest | `{manifest.digest}` |",
        "| tokens seen | 123,456 |",
        "| held-out loss | 2.2500 nats per token, 4.5000 bits per byte, by a peer's word |",
        "| `model.hidden_size` | `32` |",
        "![Held-out loss by round](loss.svg)",
    ):
        assert words in card, words
    assert card.index("`QmB`") < card.index("`QmA`"), "the largest contributor comes first"
    assert "<script>" not in card and "](http" not in card and hostile not in card
    picture = ElementTree.fromstring((tmp_path / "loss.svg").read_text())
    titles = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[1:] == ["round 1: 4.5000", "round 3: 2.2500"], "nothing of later rounds"
    facts = json.loads((tmp_path / "swarm_export.json").read_text())
    assert (facts["round"], facts["val_loss"], facts["run_id"]) == (3, 2.25, manifest.run)


def test_extras_are_added_after_everything_else(found: AgreedModel, tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def extra(folder: Path, facts: ExportFacts) -> None:
        seen.append({path.name for path in folder.iterdir()})
        assert facts.model is found
        (folder / "more").write_text(facts.run_id)

    write_export(tmp_path, ExportFacts(found), [extra])
    assert {"README.md", "config.json", "swarm_export.json", "tokenizer.json"} <= seen[0]
    assert (tmp_path / "more").read_text().startswith("demo-")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "name --out DIR, or --every ROUNDS --output-dir DIR"),
        (("--every", 2), "--every and --output-dir go together"),
        (("--out", "a", "--output-dir", "b", "--every", 2), "name --out DIR, or --every"),
        (("--every", 2, "--output-dir", "b"), "--initial-peers is missing"),
        (("--out", "a", "--max-shard-size", "5"), "a size without a unit"),
        (("--out", "a", "--max-shard-size", "0"), "leaves no room"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, line = invoke("--state-dir", tmp_path / "no", *options)
    assert code == ConfigError.exit_code and said in line
    assert list(tmp_path.iterdir()) == []
