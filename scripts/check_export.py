"""Measures an exported model in Transformers and compares its loss with the swarm's.

Usage: scripts/check_export.py MODEL_FOLDER --state-dir PEER_STATE_DIR
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.data.held_out import HeldOut
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.rounds.record_file import RecordFile
from swarm.peer.machine.state_directory import RunDirectory
from swarm.peer.text.agreed_model import held_out_of

TOLERANCE = 1e-3
"""Nats per token. Both sides compute in fp32."""
BATCH = 64


def main() -> int:
    """Prints both losses. Returns 1 with a message if they differ by more than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--state-dir", type=Path, required=True)
    arguments = parser.parse_args()
    run = arguments.state_dir / "runs" / (arguments.state_dir / "current_run").read_text().strip()
    record = RecordFile(run / "record").read()
    assert record is not None, "the peer has no record"
    ours = validation_loss(arguments.state_dir.parent, record.tip.digest)
    held_out = held_out_of(record.tip, RunDirectory(run).read_config(), BlobStore(run))
    theirs = transformers_loss(arguments.model, held_out)
    AutoTokenizer.from_pretrained(arguments.model)
    print(f"held-out loss: {ours:.5f} in the swarm, {theirs:.5f} in Transformers")
    print(f"which is {held_out.bits_per_byte(theirs):.5f} bits/byte")
    if abs(ours - theirs) <= TOLERANCE:
        return 0
    print(
        f"check_export: {arguments.model} is not the model of the swarm: its loss is "
        f"{theirs - ours:+.5f} nats/token off, where {TOLERANCE} are allowed",
        file=sys.stderr,
    )
    return 1


def validation_loss(swarm: Path, digest: str) -> float:
    """The loss that a peer of the local swarm measured for this manifest."""
    for path in sorted(swarm.glob("peer-*/runs/*/events.jsonl")):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "validation" and event["digest"] == digest:
                return float(event["val_loss"])
    raise SystemExit(f"no peer measured manifest {digest[:12]}")


def transformers_loss(folder: Path, held_out: HeldOut) -> float:
    """Mean cross-entropy of the exported model in nats per token, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def loss_of(tokens_BT1: torch.Tensor, scored_BT: torch.Tensor) -> float:
        total = 0.0
        for batch_BT1, counts_BT in zip(
            tokens_BT1.split(BATCH), scored_BT.split(BATCH), strict=True
        ):
            logits_NV = model(batch_BT1[:, :-1]).logits[counts_BT]
            labels_N = batch_BT1[:, 1:][counts_BT]
            total += torch.nn.functional.cross_entropy(logits_NV, labels_N, reduction="sum").item()
        return total / int(scored_BT.sum())

    with torch.no_grad():
        return held_out.mean(loss_of)


if __name__ == "__main__":
    sys.exit(main())
