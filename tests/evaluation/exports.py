"""Tiny exports with a known held-out text."""

from pathlib import Path

from swarm.config import RunConfig
from swarm.data.tokenizer import BYTE, Tokenizer
from swarm.data.tokenizer_file import train_tokenizer
from swarm.evaluation.tasks import write_task
from swarm.model.huggingface import save_model
from tests.model.samples import random_weights, tiny_run

DOCUMENTS = [
    "A first document,\n\nwith [brackets] and {{braces}}; it is longer than one window.\n" * 3,
    "<|endoftext|> is text",
    "[1, 2]",
    "é 中 \U0001f600 and a tab\t.",
    "x",
]
BPE = train_tokenizer([document.encode() for document in DOCUMENTS] * 9, 300)
TOKENIZERS: dict[str, Tokenizer] = {"byte": BYTE, "bpe": BPE}


def make_export(folder: Path, tokenizer: Tokenizer, *, std: float = 0.1) -> RunConfig:
    """An export of a tiny model with random weights and very uneven logits."""
    run = tiny_run(vocab_size=320)
    save_model(
        folder, run, random_weights(run, std=std).items(), eos_token_id=tokenizer.end_of_text
    )
    tokenizer.save(folder, model_max_length=run.data.sequence_length)
    write_task(folder, DOCUMENTS)
    return run
