"""Makes a tokenizer for a text: byte-level BPE, as GPT-2's, so that every text has tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from swarm.data.encoders import require_package
from swarm.data.tokenizer_file import FileTokenizer
from swarm.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
MIN_VOCABULARY = 257
"""256 bytes and the end of text."""


def train_tokenizer(documents: Iterable[bytes], vocab_size: int) -> FileTokenizer:
    """A tokenizer with so many ids at most; fewer where the text has no more pairs.

    Equal documents in equal order give an equal file. Memory is that of the text's different words.

    Documents are UTF-8; the 256 bytes and the end of text are among the ids.

    Raises:
        TokenizerError: the package tokenizers is not installed.
        ConfigError: too few ids.

    Source: R. Sennrich et al., arXiv 1508.07909; bytes and the splitting of words as in GPT-2.
    """
    if vocab_size < MIN_VOCABULARY:
        raise ConfigError(f"--vocab-size {vocab_size}: at least {MIN_VOCABULARY}")
    require_package()
    import tokenizers  # optional: only this and the processes that encode need it

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(_texts(documents), trainer)
    return FileTokenizer.of(made.to_str(pretty=True).encode())


def _texts(documents: Iterable[bytes]) -> Iterator[str]:
    for document in documents:
        yield document.decode()
