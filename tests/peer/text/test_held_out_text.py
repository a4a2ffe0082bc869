"""The held-out text is decoded from the run's tokens, or not at all."""

import dataclasses

import numpy as np
import pytest
import tokenizers

from swarm.data.tokenizer import BYTE, Tokenizer
from swarm.data.tokenizer_file import FileTokenizer
from swarm.errors import DataError
from swarm.network.blobs.blob_store import BlobStore
from swarm.peer.text.agreed_model import AgreedModel, held_out_text
from swarm.protocol.values.texts import TokenizerFile
from tests.evaluation.exports import BPE, DOCUMENTS
from tests.model.samples import tiny_run
from tests.monitor.small_swarm import manifest


def agreed(tokenizer: Tokenizer, documents: list[str], num_bytes: int | None = None) -> AgreedModel:
    """A run whose founder held these documents out."""
    store, encoded = BlobStore(), [document.encode() for document in documents]
    tokens = np.concatenate(list(tokenizer.encoded(encoded))).astype("<u4").tobytes()
    founding = manifest().founding
    file = None
    if isinstance(tokenizer, FileTokenizer):
        size = sum(map(len, encoded)) if num_bytes is None else num_bytes
        digest = store.put(tokenizer.content)
        file = TokenizerFile(digest, len(tokenizer.content), tokenizer.end_of_text, size)
    founding = dataclasses.replace(founding, validation=store.put(tokens), tokenizer=file)
    return AgreedModel(tiny_run(vocab_size=320), manifest(founding=founding), store)


@pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=["byte", "bpe"])
def test_documents_come_back_as_they_were(tokenizer: Tokenizer) -> None:
    assert held_out_text(agreed(tokenizer, DOCUMENTS)) == DOCUMENTS


def test_a_tokenizer_that_forgets_how_a_text_was_written_gives_no_text() -> None:
    made = tokenizers.Tokenizer.from_str(BPE.content.decode())
    made.normalizer = tokenizers.normalizers.Lowercase()
    lower = FileTokenizer.of(made.to_str().encode())
    assert held_out_text(agreed(lower, ["all lower"])) == ["all lower"]
    # As many bytes, and the same tokens: the capitals are lost without a trace.
    assert held_out_text(agreed(lower, ["All Lower"])) == ["all lower"]
    made.normalizer = tokenizers.normalizers.Replace(" ", "")
    with pytest.raises(DataError, match="does not reproduce the held-out text"):
        held_out_text(agreed(FileTokenizer.of(made.to_str().encode()), ["two words"]))


def test_tokens_that_no_text_has_give_no_text() -> None:
    found = agreed(BYTE, ["x"])
    torn = np.array([0xC3, 256, 65, 256], dtype="<u4").tobytes()
    founding = dataclasses.replace(
        found.manifest.founding, validation=found.store.put(torn), tokenizer=None
    )
    changed = dataclasses.replace(found.manifest, founding=founding)
    with pytest.raises(DataError, match="does not reproduce"):
        held_out_text(dataclasses.replace(found, manifest=changed))
