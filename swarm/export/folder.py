"""One export: a folder with everything that Transformers, the hub and a reader need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarm import durable
from swarm.data.tokenizer import readable_json, write_json
from swarm.export.card import CARD_FILE, card
from swarm.export.curve import CURVE_FILE, curve
from swarm.export.facts import ExportFacts
from swarm.model.huggingface import save_model

FACTS_FILE = "swarm_export.json"
GENERATION_FILE = "generation_config.json"

Extra = Callable[[Path, ExportFacts], None]
"""Does something with an export's folder, such as adding files after all others are in it."""


def nothing_more(folder: Path, facts: ExportFacts) -> None:
    """The `Extra` of whoever wants none."""


def write_export(folder: Path, facts: ExportFacts, extras: Sequence[Extra] = ()) -> None:
    """Writes one agreed model into a folder: weights, configuration, tokenizer and model card.

    Text that spells a special token stays text, since the tokenizer's files say
    `split_special_tokens`. Memory: a shard twice.

    Args:
        folder: made when missing; files of an earlier export in it are replaced.
        facts: the model, and what is known of it.
        extras: what else is to be written, in this order.

    Raises:
        CorruptState: a blob of the model is missing.
        BadBlob: a blob has not the size of its unit.
        OSError: the disk refused.
    """
    model, form = facts.model, facts.form
    run, tokenizer = model.run, model.tokenizer()
    save_model(
        folder,
        run,
        model.tensors(),
        eos_token_id=tokenizer.end_of_text,
        max_shard_bytes=form.max_shard_bytes,
        dtype=form.dtype,
    )
    write_json(folder / GENERATION_FILE, generation_config(tokenizer.end_of_text))
    tokenizer.save(folder, model_max_length=run.data.sequence_length)
    write_facts(folder, facts)
    for extra in extras:
        extra(folder, facts)
    sync_tree(folder)


def write_facts(folder: Path, facts: ExportFacts) -> None:
    """Writes what is known of an export, for people and for programs; raises OSError."""
    durable.write_file(folder / FACTS_FILE, readable_json(facts.as_json()).encode())
    picture = folder / CURVE_FILE
    if facts.losses:
        drawn = curve(facts.losses, "held-out loss, nats per token")
        durable.write_file(picture, drawn.encode())
    else:
        picture.unlink(missing_ok=True)
    durable.write_file(folder / CARD_FILE, card(facts).encode())


def generation_config(end_of_text: int) -> dict[str, Any]:
    """The contents of generation_config.json: where a text ends, and with what batches are filled.

    Source: Transformers 5.23 `GenerationConfig`; what is left out has its default, greedy decoding.
    """
    return {"bos_token_id": None, "eos_token_id": end_of_text, "pad_token_id": end_of_text}


def sync_tree(folder: Path) -> None:
    """Makes all files below a folder durable, and their names; raises OSError."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            durable.sync_folder(path)
        elif not path.is_symlink():
            durable.sync_file(path)
    durable.sync_folder(folder)
