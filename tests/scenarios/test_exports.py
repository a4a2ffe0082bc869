"""An exporter follows a live swarm to its end. Each export is the model of its round."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.check_export import transformers_loss
from swarm.data.tokenizer import END_OF_TEXT
from swarm.emulation.local_swarm import LocalSwarm
from swarm.network.blobs.blob_store import BlobStore
from swarm.peer.text.agreed_model import held_out_of
from tests.scenarios.swarms import ROUND_S, read_record, read_run, run_folder, started_swarm

pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]

ROUNDS = 41
"""Enough rounds for the exporter to start long before the last one."""
TOLERANCE = 1e-3
"""Nats per token. Both sides compute in fp32."""


def losses_of(swarm: LocalSwarm) -> dict[str, float]:
    """Manifest digest -> held-out loss measured by the peers."""
    return {
        str(event["digest"]): float(event["val_loss"])
        for peer in swarm.peers
        for event in peer.events()
        if event["event"] == "validation"
    }


def test_each_export_of_a_live_run_has_its_rounds_held_out_loss(tmp_path: Path) -> None:
    out = tmp_path / "exports"
    with started_swarm(
        tmp_path, 2, [f"run.rounds={ROUNDS}", "round.local_steps=12"], options=["--linger", "600"]
    ) as swarm:
        command = [sys.executable, "-m", "peers.export", "--every", "2", "--output-dir", str(out)]
        command += ["--initial-peers", swarm.peers[0].join_address(), "--keep", "9"]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=6 * ROUND_S, check=False
        )
        assert ended.returncode == 0, ended.stderr
        losses, record = losses_of(swarm), read_record(swarm.peers[0])
        held_out = held_out_of(
            record.tip, read_run(swarm.run_file), BlobStore(run_folder(swarm.peers[0]))
        )
    sys.stdout.write(ended.stdout)
    rounds = sorted(int(path.name[6:]) for path in out.glob("round-*"))
    assert rounds[-1] == ROUNDS and len(rounds) >= 3
    assert os.readlink(out / "latest") == f"round-{ROUNDS:06d}"
    for number in rounds:
        folder = out / f"round-{number:06d}"
        facts = json.loads((folder / "swarm_export.json").read_text())
        theirs = transformers_loss(folder, held_out)
        ours = losses[facts["manifest"]]
        sys.stdout.write(f"round {number}: {ours:.5f} in the swarm, {theirs:.5f} in Transformers\n")
        assert abs(ours - theirs) < TOLERANCE
        assert facts["val_loss"] in (ours, None)  # None: a peer was slow to measure it
    assert theirs < math.log(258) - 0.2, "it has learned something"
    tokenizer = AutoTokenizer.from_pretrained(out / "latest")
    model = AutoModelForCausalLM.from_pretrained(out / "latest")
    ids = tokenizer("def main", return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=8)
    assert made.shape[1] > ids.shape[1] or int(made[0, -1]) == END_OF_TEXT
    assert torch.equal(made[:, : ids.shape[1]], ids)
