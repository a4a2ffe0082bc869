"""A run that starts from a checkpoint: the founder has its weights, joiners fetch them."""

import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import swarm
from swarm.data.held_out import HeldOut
from swarm.model.described import run_of_checkpoint
from swarm.model.huggingface import save_model
from swarm.network.blobs.blob_store import BlobStore
from swarm.peer.text.agreed_model import held_out_of, open_state, recompute_initial
from swarm.protocol.values.layout import layout_of
from tests.model.checkpoints import make_checkpoint, tokens_of
from tests.model.samples import random_weights
from tests.model.samples import tiny_run as model_run
from tests.peer.adopting import founded_in
from tests.peer.test_session import ALONE_S, Heard, machine
from tests.scenarios.swarms import write_run
from tests.train.runs import tiny_run

SMALL = [
    "run.rounds=1",
    "run.initial=given",
    "round.local_steps=2",
    "merging.alpha=0.0",
]


def test_given_weights_are_never_computed_by_joiners() -> None:
    """Values that follow from the seed are, though here they would even be right."""
    seeded, founders = tiny_run(), BlobStore(None)
    manifest, layout = founded_in(founders, seeded, ["me"]), layout_of(seeded)
    given = seeded.model_copy(update={"run": seeded.run.model_copy(update={"initial": "given"})})
    for run, number in ((given, 0), (seeded, len(manifest.entries))):
        store = BlobStore(None)
        recompute_initial(manifest, run, layout, store)
        assert sum(store.has(entry.digest) for entry in manifest.entries.values()) == number


def loss_of(model: PreTrainedModel, held_out: HeldOut) -> float:
    """Nats per token of the held-out text, as Transformers computes it."""

    def mean(tokens_BT1: Tensor, scored_BT: Tensor) -> float:
        with torch.no_grad():
            logits = model(tokens_BT1[:, :-1]).logits
        labels = tokens_BT1[:, 1:]
        return F.cross_entropy(logits[scored_BT], labels[scored_BT]).item()

    return held_out.mean(mean)


def made(folder: Path, kind: str) -> PreTrainedModel:
    """A checkpoint of Transformers, or an export of ours in Transformers' format."""
    if kind != "export":
        return make_checkpoint(folder, kind, fused=True)
    run = model_run(qk_norm="none", norm_topk_prob=True, head_dim=12)
    save_model(folder, run, random_weights(run).items(), max_shard_bytes=200_000)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return model


@pytest.mark.scenario
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_moe",
        pytest.param("olmoe", marks=pytest.mark.exhaustive),
        pytest.param("export", marks=pytest.mark.exhaustive),
    ],
)
def test_round_0_has_the_checkpoints_loss_and_joiners_fetch_it(tmp_path: Path, kind: str) -> None:
    theirs = made(tmp_path / "checkpoint", kind)
    described, heard = run_of_checkpoint(tmp_path / "checkpoint").model, Heard()
    settings = [f"model.{k}={v!r}" for k, v in described.model_dump(exclude_none=True).items()]
    settings = [each.replace("True", "true").replace("False", "false") for each in settings]
    run = swarm.load_run(write_run(tmp_path, [*SMALL, *settings]))
    wanted = swarm.Wanted(run=run, initialise_from=tmp_path / "checkpoint")
    config, losses = machine("peer.wait_for_peers=2"), dict[int, float]()
    heard.on_validation = lambda number, loss, _: losses.update({number: loss})  # type: ignore[method-assign]

    def founding() -> None:
        with swarm.Peer.start(tmp_path / "a", wanted, config=config, observer=heard) as peer:
            peer.train()
            peer.serve(5)

    founder = threading.Thread(target=founding, daemon=True)  # a failed test has no joiner
    founder.start()
    assert heard.is_up.wait(ALONE_S)
    joins = Heard()
    joins.on_validation = heard.on_validation  # type: ignore[method-assign]
    folder = tmp_path / "b"
    wanted = swarm.Wanted(invitation=swarm.read_invitation(heard.invitation))
    with swarm.Peer.join(
        [heard.address], folder, config=machine(), wanted=wanted, observer=joins
    ) as joiner:
        model = swarm.build_model(run, joiner.weights())
        assert joiner.train().round == 1
    founder.join(ALONE_S)
    tokens = tokens_of()
    with torch.no_grad():
        assert (model(tokens) - theirs(tokens).logits).abs().max() < 1e-5
    directory, state = open_state(folder)
    held_out = held_out_of(state.manifest, run, state.store)
    directory.close()
    assert losses[0] == pytest.approx(loss_of(theirs, held_out), abs=1e-5)
    assert not any("rounded" in notice for notice in heard.notices)
