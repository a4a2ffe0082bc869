"""Measures an exported model in Transformers and compares it with what the swarm measured.

Usage: scripts/check_export.py MODEL_FOLDER --state-dir PEER_STATE_DIR
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.data.loader import held_out_sequences
from swarm.network.blobs import BlobStore
from swarm.network.record_file import RecordFile

TOLERANCE = 1e-3
"""Nats per token; both sides compute in fp32."""
BATCH = 64


def main() -> int:
    """Prints both losses; returns 1 if they differ by more than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--state-dir", type=Path, required=True)
    arguments = parser.parse_args()
    run = arguments.state_dir / "runs" / (arguments.state_dir / "current_run").read_text().strip()
    record = RecordFile(run / "record").read()
    assert record is not None, "the peer has no record"
    ours = validation_loss(arguments.state_dir.parent, record.tip.digest)
    blob = BlobStore(run).get(record.tip.founding.validation)
    assert blob is not None, "the held-out tokens are in every peer's store"
    tokens = np.frombuffer(bytes(blob), dtype="<u4").astype(np.int64)
    length = json.loads((run / "config.json").read_text())["data"]["sequence_length"]
    theirs = transformers_loss(arguments.model, held_out_sequences(tokens, length))
    AutoTokenizer.from_pretrained(arguments.model)
    print(f"held-out loss: {ours:.5f} in the swarm, {theirs:.5f} in Transformers")
    return int(abs(ours - theirs) > TOLERANCE)


def validation_loss(swarm: Path, digest: str) -> float:
    """What a peer of the local swarm measured for this manifest."""
    for path in sorted(swarm.glob("peer-*/runs/*/events.jsonl")):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "validation" and event["digest"] == digest:
                return float(event["val_loss"])
    raise SystemExit(f"no peer measured manifest {digest[:12]}")


def transformers_loss(folder: Path, tokens_BT1: torch.Tensor) -> float:
    """Mean cross-entropy of the exported model in nats per token, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total = 0.0
    with torch.no_grad():
        for batch_BT1 in tokens_BT1.split(BATCH):
            logits_BTV = model(batch_BT1[:, :-1]).logits
            total += torch.nn.functional.cross_entropy(
                logits_BTV.flatten(0, 1), batch_BT1[:, 1:].flatten(), reduction="sum"
            ).item()
    return total / tokens_BT1[:, 1:].numel()


if __name__ == "__main__":
    sys.exit(main())
