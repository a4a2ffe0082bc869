"""swarm-data: makes a tokenizer and token shards from text, and inspects them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from peers.command_line.command import configure_logging
from peers.command_line.option_values import require_folder
from peers.command_line.options import OPTIONS, Program, option, version_option
from swarm import durable
from swarm.config import RunConfig, parse_config
from swarm.data import shard_writer
from swarm.data.corpus import listed_corpus, open_corpus, open_mixture
from swarm.data.dataset_rows import DatasetText
from swarm.data.documents import TEXT
from swarm.data.held_out import MAX_HELD_OUT_TEXT, whole_held_out
from swarm.data.shards import Prepared, Shards, is_prepared, open_prepared
from swarm.data.token_arrays import ReadyTokens, ready_tokens
from swarm.data.tokenizer import BYTE, Tokenizer
from swarm.data.tokenizer_file import FILE, open_tokenizer, train_tokenizer
from swarm.errors import DataError
from swarm.protocol.records.printable import printable
from swarm.run_files import read_text

MODEL_MAX_LENGTH = 2**20
"""`model_max_length` of a new tokenizer, which has no model yet."""
_CORPUS = (
    "Folder of .txt, .md, .py, .html, .json, .jsonl and .parquet files. By default the Python "
    "standard library."
)
_RUNS = "runs"
"""Subfolder of a peer's state directory."""
_COLUMN = option(
    "--column",
    default=TEXT,
    show_default=True,
    help="Column of .parquet files, and key of JSON objects, that has the text.",
)


class Programs(Program, click.Group):
    """Several commands, which all end like a `Program`."""

    command_class = Program


@click.group("swarm-data", cls=Programs, context_settings={"help_option_names": ["-h", "--help"]})
@version_option("swarm-data")
@OPTIONS["log_format"]
@OPTIONS["log_level"]
def main(log_format: str, log_level: str | None) -> None:
    """Makes a tokenizer and shards of tokens from text, and checks them.

    \b
    swarm-data train-tokenizer --corpus DIR --vocab-size 32000 --out TOKENIZER
    swarm-data tokenize --corpus DIR --tokenizer TOKENIZER --out SHARDS
    swarm-peer --run FILE --tokenizer TOKENIZER --corpus SHARDS
    """  # noqa: D301 - click reads the backspace
    configure_logging(log_format, log_level or "info")


@main.command("train-tokenizer")
@option("--corpus", metavar="FOLDER", help=_CORPUS)
@_COLUMN
@OPTIONS["follow_links"]
@OPTIONS["list_skipped"]
@option("--vocab-size", type=click.IntRange(min=1), required=True, help="Largest number of ids.")
@option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write into.")
def train(
    *,
    corpus: str | None,
    column: str,
    follow_links: bool | None,
    list_skipped: bool | None,
    vocab_size: int,
    out: Path,
) -> None:
    """Makes a byte-level BPE tokenizer from the documents that are not held out.

    Equal text gives an equal file. Memory grows with the number of different words. A sample of
    some gigabytes is enough for any vocabulary.
    """
    require_folder(out)
    one_pass = shard_writer.Pass(open_corpus(corpus, column, follow_links=bool(follow_links)))
    made = train_tokenizer(one_pass.training_documents(), vocab_size)
    contents = one_pass.contents()
    if not contents.documents:
        raise one_pass.no_text()
    durable.make_folder(out)
    made.save(out, model_max_length=MODEL_MAX_LENGTH)
    fewer = (
        "" if made.num_ids == vocab_size else f", since the text has no more than {made.num_ids}"
    )
    click.echo(printable(f"{out / FILE}: {made.name}, {made.num_ids:,} ids{fewer}"))
    _say_read(contents, list_skipped)


@main.command("tokenize")
@OPTIONS["run"]
@option("--corpus", metavar="FOLDER", help=f"{_CORPUS} .npy and .bin files hold tokens.")
@_COLUMN
@OPTIONS["follow_links"]
@OPTIONS["list_skipped"]
@option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="Folder with a tokenizer.json; by default tokens are bytes.",
)
@option("--out", type=click.Path(path_type=Path), required=True, help="Folder of shards.")
@option(
    "--shard-tokens",
    type=click.IntRange(min=1),
    default=shard_writer.SHARD_TOKENS,
    show_default=True,
    help="Size of a shard. The document that reaches this size is the last in its shard.",
)
@option("--keep-copies", is_flag=True, help="Keep copies of documents.")
@option(
    "--drop-repetition",
    is_flag=True,
    help="Leave out documents in which a sequence of 1 to 13 tokens is repeated 32 times in a row.",
)
@option(
    "--pack",
    metavar="LENGTH",
    type=click.IntRange(min=2),
    help='Pack whole documents into sequences of LENGTH tokens, for data.attention = "document".',
)
@option(
    "--input-end-of-text",
    type=click.IntRange(min=0),
    help="Id that ends documents in .npy and .bin files, if not the tokenizer's.",
)
@option("--dataset", metavar="NAME", help="Data set on the Hugging Face hub, or a folder with it.")
@option("--dataset-config", metavar="NAME", help="Configuration of --dataset.")
@option("--split", default="train", show_default=True, help="Split of --dataset.")
def tokenise(
    *,
    run: Path | None,
    dataset: str | None,
    dataset_config: str | None,
    split: str,
    corpus: str | None,
    column: str,
    follow_links: bool | None,
    list_skipped: bool | None,
    tokenizer: Path | None,
    out: Path,
    shard_tokens: int,
    keep_copies: bool,
    drop_repetition: bool,
    pack: int | None,
    input_end_of_text: int | None,
) -> None:
    """Makes shards of tokens from a text, for --corpus of swarm-peer.

    The same text, tokenizer and options give the same shards, byte by byte, on any number of cores.
    After a kill the same command continues after the last whole shard. Of the file in --run only
    data.mixture is used: it names the folders in --corpus to mix.
    """
    require_folder(out)
    used = _tokenizer(tokenizer)
    if dataset and (corpus or run):
        raise click.UsageError("--dataset is a text of its own: leave out --corpus and --run")
    source = (
        DatasetText(dataset, dataset_config, split, column)
        if dataset
        else _source(run, corpus, column, used, input_end_of_text, follow_links=bool(follow_links))
    )
    if (out / shard_writer.HEADER).exists():
        raise DataError(f"{out}: holds finished shards", hint="remove it, or name another folder")
    durable.make_folder(out)
    shard_writer.write_shards(
        source,
        out,
        used,
        shard_tokens=shard_tokens,
        drop_copies=not keep_copies,
        drop_repetition=drop_repetition,
        pack=pack,
        held_out=_held_out(source, used),
    )
    prepared = open_prepared(out)
    _show(prepared, prepared.open(used), as_json=False, list_skipped=list_skipped)


@main.command("info")
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@OPTIONS["initial_peers"]
@option("--run-id", help="Id of the run, where there are several.")
@_COLUMN
@OPTIONS["follow_links"]
@OPTIONS["list_skipped"]
@OPTIONS["as_json"]
def info(
    *,
    folder: Path | None,
    initial_peers: tuple[str, ...],
    run_id: str | None,
    column: str,
    follow_links: bool | None,
    list_skipped: bool | None,
    as_json: bool,
) -> None:
    """Says what a folder of text, shards or a tokenizer holds, or how much a run has read.

    To see how much a run has read, name the state directory of a peer that is not running, or
    --initial-peers.
    """
    if (folder is None) == (not initial_peers):
        raise click.UsageError("name a folder, or --initial-peers ADDRESS (SWARM_INITIAL_PEERS)")
    folder = folder.expanduser().absolute() if folder else None
    if folder is None or (folder / _RUNS).is_dir():
        from peers.actions.text_coverage import coverage  # loads torch and hivemind: not for --help

        _say(coverage(folder, initial_peers, run_id), as_json)
        return
    if not (folder / shard_writer.HEADER).exists() and (folder / FILE).exists():
        found = open_tokenizer(folder)
        _say(
            {
                "tokenizer": found.name,
                "ids": found.num_ids,
                "end_of_text": found.end_of_text,
                "end_of_text_token": found.end_of_text_token,
                "bytes": len(found.content),
            },
            as_json,
        )
        return
    if is_prepared(folder):
        prepared = open_prepared(folder)
        _show(prepared, prepared.opened(), as_json=as_json, list_skipped=list_skipped)
        return
    text = listed_corpus(folder, column, follow_links=bool(follow_links))
    one_pass = shard_writer.Pass(text)
    deque(one_pass.training_documents(), maxlen=0)
    contents = one_pass.contents()
    figures = _shown(contents, as_json)
    del figures["digest"]  # a digest of tokens, and there are no tokens yet
    _say({"text": text.name, **figures}, as_json)
    if not as_json:
        _say_read(contents, list_skipped)


@main.command("verify")
@click.argument("folder", type=click.Path(path_type=Path))
@option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="Folder of the tokenizer that must have made the shards.",
)
def verify(folder: Path, tokenizer: Path | None) -> None:
    """Reads every byte of a folder of shards; ends with exit code 4 if anything is wrong.

    Shards of another tokenizer than that of --tokenizer are wrong. Without --tokenizer, ids are
    checked only where tokens are bytes.
    """
    prepared = open_prepared(folder.absolute())
    used = _tokenizer(tokenizer) if tokenizer or prepared.tokenizer == BYTE.name else None
    shards = prepared.open(used) if used else prepared.opened()
    for number, array in enumerate(shards.arrays):
        end = used.end_of_text if used else int(shards.arrays[0][-1])
        if int(array[-1]) != end or (used and int(array.max()) >= used.num_ids):
            raise DataError(
                f"{folder}: shard {number} ends in a document, or has ids that "
                f"{prepared.tokenizer} has not",
                hint="make the folder again with swarm-data tokenize",
            )
    kept = sum(1 for _ in prepared.documents())
    unchecked = "" if used else f"; its ids were not checked against {prepared.tokenizer}"
    click.echo(
        f"{folder}: whole; {shards.summary()}; held-out documents kept as text: {kept}{unchecked}"
    )


def _tokenizer(folder: Path | None) -> Tokenizer:
    return open_tokenizer(folder) if folder else BYTE


def _source(
    run: Path | None,
    corpus: str | None,
    column: str,
    tokenizer: Tokenizer,
    input_end_of_text: int | None,
    *,
    follow_links: bool,
) -> shard_writer.Source:
    if run:
        config = parse_config(RunConfig, read_text(run, "runs"), source=str(run))
        if config.data.mixture:
            return open_mixture(corpus, config.data.mixture, column, follow_links=follow_links)
    if corpus and (
        ready := ready_tokens(Path(corpus), tokenizer, input_end_of_text, follow_links=follow_links)
    ):
        return ready
    return open_corpus(corpus, column, follow_links=follow_links)


def _held_out(source: shard_writer.Source, tokenizer: Tokenizer) -> Iterator[bytes]:
    """Whole held-out documents as text, as many as the largest run may need."""
    size, is_ready = 0, isinstance(source, ReadyTokens)
    # An id takes 4 bytes here, and represents about a byte of text or more.
    limit = (4 if is_ready else 2) * MAX_HELD_OUT_TEXT
    found = list(dict.fromkeys(whole_held_out(source.documents(), limit)))
    if is_ready:
        texts = tokenizer.decoded([np.frombuffer(document, dtype="<u4") for document in found])
        found = [text.decode(errors="replace").encode() for text in texts]
    for text in found:
        size += len(text)
        if size > MAX_HELD_OUT_TEXT:
            return
        yield text


def _show(prepared: Prepared, shards: Shards, *, as_json: bool, list_skipped: bool | None) -> None:
    found: dict[str, Any] = {
        "text": prepared.name,
        "mixture": [list(share) for share in prepared.mixture],
        "tokenizer": prepared.tokenizer,
        **({"packed_into": prepared.pack} if prepared.pack else {}),
        "shards": len(shards.arrays),
        "tokens": shards.num_tokens,
        **_shown(shards.contents, as_json),
    }
    per_token = shards.contents.training_bytes / max(shards.num_tokens, 1)
    _say(found | {"bytes_per_token": round(per_token, 3)}, as_json)
    if not as_json:
        _say_read(shards.contents, list_skipped)


def _shown(contents: shard_writer.Contents, as_json: bool) -> dict[str, Any]:
    """The figures of a text. For programs also the unread input, by reason and name."""
    found = asdict(contents)
    if not as_json:
        for name in ("skipped", "unread", "skipped_names", "unread_names"):
            del found[name]
    return found


def _say_read(contents: shard_writer.Contents, list_skipped: bool | None) -> None:
    """Prints a line about read and unread input, and on request all names of unread input."""
    for line in (contents.summary(), *(contents.tally.names() if list_skipped else ())):
        click.echo(printable(line))


def _say(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found))
        return
    for key, value in found.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        click.echo(printable(f"{key.replace('_', ' '):>20}  {shown}"))


if __name__ == "__main__":
    main()
