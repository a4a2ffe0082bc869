"""The tokenizer of a run: a founder names it, joiners get it from strangers."""

import json
from pathlib import Path

import pytest

from swarm.config import RunConfig, parse_config
from swarm.data.tokenizer import BYTE
from swarm.data.tokenizer_file import train_tokenizer
from swarm.errors import (
    BadBlob,
    BadManifest,
    ConfigError,
    CorruptState,
    RunMismatch,
    TokenizerError,
)
from swarm.network.blobs.blob_store import BlobStore
from swarm.peer.text.run_start import founders_tokenizer
from swarm.peer.text.run_text import given_tokenizer, require_kind, wanted_tokenizer
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.texts import TokenizerFile
from tests.scenarios.swarms import EXACT

TOKENIZER = train_tokenizer([b"some words, some more words and some other words"] * 9, 270)
CONTENT = TOKENIZER.content
FILE = TokenizerFile(digest_of(CONTENT), len(CONTENT), TOKENIZER.end_of_text, 100)


def run_of(**overrides: object) -> RunConfig:
    settings = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return parse_config(RunConfig, EXACT, source="test", overrides=settings)


RUN = run_of(data__tokenizer="file", model__vocab_size=512)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TOKENIZER.save(tmp_path, model_max_length=64)
    return tmp_path


def test_a_founder_has_bytes_or_the_file_that_it_names(folder: Path) -> None:
    assert founders_tokenizer(run_of(), None) is BYTE
    assert founders_tokenizer(RUN, folder).name == TOKENIZER.name
    with pytest.raises(ConfigError, match=r"no tokenizer was named.*--tokenizer DIR"):
        founders_tokenizer(RUN, None)
    with pytest.raises(ConfigError, match=r'data.tokenizer = "byte"'):
        founders_tokenizer(run_of(), folder)


def test_a_vocabulary_may_be_padded_and_not_too_small(folder: Path) -> None:
    exact = run_of(data__tokenizer="file", model__vocab_size=TOKENIZER.num_ids)
    assert founders_tokenizer(exact, folder).num_ids == exact.model.vocab_size
    small = run_of(data__tokenizer="file", model__vocab_size=TOKENIZER.num_ids - 1)
    with pytest.raises(ConfigError, match=f"--set model.vocab_size={TOKENIZER.num_ids}, or"):
        founders_tokenizer(small, folder)
    with pytest.raises(BadBlob, match="ids up to"):
        given_tokenizer(small, FILE, CONTENT)


def test_a_joiner_gets_what_the_founder_has() -> None:
    assert given_tokenizer(RUN, FILE, memoryview(CONTENT)) == TOKENIZER


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80", b"[" * 10**6, CONTENT[:-5], json.dumps({"model": {}}).encode()],
)
def test_a_stranger_that_gives_no_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(BadBlob, match="the run's tokenizer: ") as refused:
        given_tokenizer(RUN, FILE, content)
    assert refused.value.reason == "tokenizer"


def test_an_end_of_text_that_the_file_has_not_is_refused() -> None:
    other = TokenizerFile(FILE.digest, FILE.num_bytes, 65, 100)
    with pytest.raises(BadBlob, match="no special token 65"):
        given_tokenizer(RUN, other, CONTENT)


def test_a_joiner_without_the_package_is_told_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TokenizerError, match="pip install tokenizers"):
        given_tokenizer(RUN, FILE, CONTENT)


@pytest.mark.parametrize(("run", "file"), [(RUN, None), (run_of(), FILE)])
def test_a_run_that_says_two_things_is_refused(run: RunConfig, file: TokenizerFile | None) -> None:
    with pytest.raises(BadManifest, match=r"contradicts data\.tokenizer"):
        require_kind(run, file)
    require_kind(RUN, FILE)
    require_kind(run_of(), None)


def test_a_joiner_that_names_another_one_is_told_both(folder: Path, tmp_path: Path) -> None:
    assert given_tokenizer(RUN, FILE, CONTENT, folder) == TOKENIZER
    other = tmp_path / "other"
    other.mkdir()
    train_tokenizer([b"another text"], 260).save(other, model_max_length=64)
    with pytest.raises(RunMismatch, match=f"the run has {TOKENIZER.name}"):
        given_tokenizer(RUN, FILE, CONTENT, other)
    with pytest.raises(RunMismatch, match="the run has byte-"):
        given_tokenizer(run_of(), None, None, folder)


def test_a_lone_peer_whose_copy_is_damaged_is_told_so_at_once(tmp_path: Path) -> None:
    """No other peer has a copy, so waiting for one would be pointless."""
    store = BlobStore(tmp_path)
    with pytest.raises(CorruptState, match=r"is missing on this disk, and no.*--tokenizer DIR"):
        wanted_tokenizer(RUN, FILE, [], store)
    store.sync([store.put(CONTENT)])
    whole = wanted_tokenizer(RUN, FILE, [], store)
    assert whole is not None and whole.digest == FILE.digest
    changed = 0
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        content = path.read_bytes()
        if (place := content.find(CONTENT[:50])) >= 0:
            path.write_bytes(content[:place] + b"?" + content[place + 1 :])
            changed += 1
    assert changed == 1
    with pytest.raises(CorruptState, match=r"was changed on this disk, and no other peer"):
        wanted_tokenizer(RUN, FILE, [], BlobStore(tmp_path))
    elsewhere = wanted_tokenizer(RUN, FILE, ["12D3KooWother"], BlobStore(tmp_path))
    assert elsewhere is not None and elsewhere.sources == ("12D3KooWother",)
