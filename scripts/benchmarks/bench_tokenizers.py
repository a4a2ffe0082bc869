"""Bits per byte of a run on bytes and of runs with trained tokenizers, at equal bytes of text.

For each seed and vocabulary a lone peer is founded in this process and trains the body of
configs/runs/demo.toml on the Python standard library. "bytes" is the byte tokenizer. A number is
the vocabulary of a byte-level BPE tokenizer, made from the training documents. Sequences span the
same bytes of text in each variant (256 on average), so each step and each run read equal bytes of
text. The number of tokens, the embedding and the compute differ. Bits per byte are of the same
held-out documents.

Every finished training is a line of the results file. Trainings with equal settings, text and
tokenizer are not repeated. The last line of the output counts trainings of earlier calls.

    .venv/bin/python scripts/benchmarks/bench_tokenizers.py --results out/tokenizers.jsonl
"""

import argparse
import itertools
import math
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from cells import Results

import swarm
from swarm.config import RunConfig
from swarm.data.corpus import Split, standard_library_corpus
from swarm.data.held_out import MAX_HELD_OUT_TEXT, held_out_documents
from swarm.data.shard_writer import write_shards
from swarm.data.shards import open_folder
from swarm.data.tokenizer import BYTE, Tokenizer
from swarm.data.tokenizer_file import train_tokenizer
from swarm.experts import all_shapes

BYTES = "bytes"
SEQUENCE_BYTES = 256
SEQUENCES = 8
"""Sequences of a step."""
LOCAL_STEPS = 50


@dataclass(frozen=True)
class Made:
    """A tokenizer, its folder (None for bytes), and the standard library as its tokens."""

    tokenizer: Tokenizer
    folder: Path | None
    shards: Path
    bytes_per_token: float


@dataclass(frozen=True)
class Result:
    """One training."""

    vocabulary: str
    seed: int
    rounds: int
    bits_per_byte: float
    parameters: int
    sequence_length: int
    text_bytes: float
    """Bytes of training text."""
    wall_s: float


class Last(swarm.PeerObserver):
    """Keeps the newest loss."""

    bits_per_byte = float("nan")

    def on_validation(self, round_number: int, val_loss: float, bits_per_byte: float) -> None:
        """Keeps and prints the loss."""
        print(f"  round {round_number}: {val_loss:.4f} nats, {bits_per_byte:.4f} bits per byte")
        self.bits_per_byte = bits_per_byte


def main() -> int:
    """Runs the missing trainings and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabularies", nargs="+", default=["2048", BYTES])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6, help=f"of {LOCAL_STEPS} steps each")
    parser.add_argument("--results", type=Path, required=True)
    asked = parser.parse_args()
    results = Results(asked.results, standard_library_corpus().fingerprint())
    found = []
    with tempfile.TemporaryDirectory(prefix="bench-tokenizers-") as folder:
        made = {name: make(name, Path(folder)) for name in asked.vocabularies}
        for name, seed in itertools.product(asked.vocabularies, range(asked.seeds)):
            run = run_of(made[name], seed, asked.rounds)
            cell, key = f"{name}/{seed}", f"{run.fingerprint()} {made[name].tokenizer.name}"
            line = results.get(cell, key)
            if line is None:
                line = results.add(cell, key, {"result": asdict(train(made[name], name, run))})
            found.append(Result(**line["result"]))
    show(found)
    print(results.reused())
    return 0


def make(vocabulary: str, folder: Path) -> Made:
    """The tokenizer and the text as its tokens."""
    corpus = standard_library_corpus()
    tokenizer: Tokenizer = BYTE
    named = None
    if vocabulary != BYTES:
        split = Split.of(corpus.documents())
        training = (each for each in corpus.documents() if not split.holds_out(each))
        tokenizer = train_tokenizer(training, int(vocabulary))
        named = folder / f"tokenizer-{vocabulary}"
        named.mkdir()
        tokenizer.save(named, model_max_length=SEQUENCE_BYTES)
    shards = folder / f"shards-{vocabulary}"
    shards.mkdir()
    held_out = held_out_documents(corpus.documents(), MAX_HELD_OUT_TEXT)
    write_shards(corpus, shards, tokenizer, held_out=held_out)
    found = open_folder(shards)
    per_token = found.contents.training_bytes / found.num_tokens
    print(f"{vocabulary}: {found.num_tokens:,} tokens, {per_token:.3f} bytes each", flush=True)
    return Made(tokenizer, named, shards, per_token)


def run_of(made: Made, seed: int, rounds: int) -> RunConfig:
    """The run of a lone peer. A sequence spans the same bytes of text with every tokenizer."""
    length = round(SEQUENCE_BYTES / made.bytes_per_token)
    padded = -(-made.tokenizer.num_ids // 64) * 64
    return swarm.load_run(
        "demo",
        [
            "run.peers=1",
            f"run.rounds={rounds}",
            f"run.seed={seed}",
            f"round.local_steps={LOCAL_STEPS}",
            f"model.vocab_size={padded}",
            f"data.tokenizer={'file' if made.folder else 'byte'}",
            f"data.sequence_length={length}",
            "data.validation_bytes=65536",
            f"train.batch_tokens={SEQUENCES * length}",
            f"train.micro_batch_sequences={SEQUENCES}",
        ],
    )


def train(made: Made, vocabulary: str, run: RunConfig) -> Result:
    """Trains a lone peer from its founding to the last round."""
    seed, length = run.run.seed, run.data.sequence_length
    machine = swarm.load_peer(overrides=[f"corpus.folder={made.shards}"])
    print(f"{vocabulary}, seed {seed}, {length} tokens a sequence", flush=True)
    last, began_s = Last(), time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="lone-peer-") as state,
        swarm.Peer.found(run, state, config=machine, tokenizer=made.folder, observer=last) as peer,
    ):
        tip = peer.train()
    seen = tip.step * SEQUENCES * length * made.bytes_per_token
    shapes = all_shapes(run.model).values()
    return Result(
        vocabulary,
        seed,
        run.run.rounds,
        last.bits_per_byte,
        sum(math.prod(shape) for shape in shapes),
        length,
        seen,
        time.perf_counter() - began_s,
    )


def show(results: list[Result]) -> None:
    """The table of scripts/README.md."""
    print("| tokenizer | tokens a sequence | M parameters | MB of text | bits per byte | s |")
    print("|---|---|---|---|---|---|")
    for name in dict.fromkeys(each.vocabulary for each in results):
        mine = sorted((r for r in results if r.vocabulary == name), key=lambda r: r.seed)
        bits = [each.bits_per_byte for each in mine]
        error = statistics.stdev(bits) / len(bits) ** 0.5 if len(bits) > 1 else float("nan")
        print(
            f"| {name} | {mine[0].sequence_length} | {mine[0].parameters / 1e6:.2f} "
            f"| {mine[0].text_bytes / 1e6:.2f} | {statistics.mean(bits):.3f} ± {error:.3f} "
            f"(n = {len(bits)}) | {statistics.median(each.wall_s for each in mine):.0f} |"
        )


if __name__ == "__main__":
    sys.exit(main())
