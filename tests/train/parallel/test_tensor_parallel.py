"""Heads and experts of every layer shared by ranks with the same tokens: the values of one process.

Traffic is counted, and values under whole names are put together from the parts.
"""

import functools
from dataclasses import replace

import pytest
import torch

from swarm.config import ComputeSection
from swarm.errors import BadBlob, ConfigError
from swarm.experts import Slice, expert_shapes, owned_stack, shared_shapes
from swarm.model import moe
from swarm.model.initial_weights import initial_tensors
from swarm.model.moe import Pieces, SparseMLP, Storage
from swarm.model.routing import RoutingControls, gaussian, within_capacity
from swarm.peer.machine.worker_processes import meshes_of
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.mesh import Mesh
from swarm.train.parallel.tensor_parallel import (
    AttentionHeads,
    HeadsEngine,
    SharedBank,
    SharedTokens,
    sums_bytes,
)
from tests.train.crews import assert_holders_answer, lent_engines
from tests.train.engine.test_engine_routing import EVERYTHING
from tests.train.parallel.test_dispatch import (
    CLOSE,
    CLOSE_BF16,
    COMPARED,
    DTYPES,
    filled,
    masters,
    passed,
    tokens,
    whole_layer,
)
from tests.train.parallel.test_dispatch import RUN as SEVEN
from tests.train.runs import all_names, batch, new_engine, same, tiny_run
from tests.train.saving.test_expert_parallel import (
    LR,
    assert_as_one_process,
    handed_on,
    saved_and_resumed,
    tensors,
)
from tests.train.team import together
from tests.train.test_masks import MASKED
from tests.train.workers.test_parallel import (
    BF16,
    CLIPPED,
    OWNED,
    THEN,
    assert_a_kill_costs_nothing,
    assert_nan_changes_nothing,
    train,
)

SLOW = pytest.mark.exhaustive
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
MUON = {"optimizer": {"kind": "muon", "clip_norm": 0.1}}
ALONE = {"train": {"micro_batch_sequences": 1}}
ONE_NORM = {"model": {"qk_norm": "projection", "head_dim": None}}
Q, K, V, OUT = (f"model.layers.1.self_attn.{kind}_proj.weight" for kind in "qkvo")


def run_of(layers=2, **sections):
    """The tiny run with eight heads, four of keys and values, that is clipped."""
    model = {**EIGHT, "num_hidden_layers": layers, **sections.pop("model", {})}
    return tiny_run(**{**CLIPPED, **sections}, model=model)


RUN = run_of()
# With the seed 1 one element's gradient is all rounding, and its step is 3 % off. With four layers
# too, where later steps are 5 10^-5 of the loss off, with and without stages.
SEEDED = {"name": "tiny", "rounds": 4, "seed": 2}
INFLUENCES = run_of(**EVERYTHING, run=SEEDED)


@pytest.fixture
def cut(crews):
    """Makes engines whose heads and experts two workers share."""
    with lent_engines(crews, ep=2, tp=2) as make:
        yield make


def engine_of(ranks, run, owned=(1, 3), kind=HeadsEngine, **options):
    given = {"ep": 2, "tp": 2, **options}
    engine = kind(run, replace(EngineOptions.of(run), **given), ranks)
    engine.write(initial_tensors(run, all_names(run)))
    engine.own(owned)
    return engine


# ------------------------------------------------ held tensors


def test_ranks_that_share_heads_are_neighbours_and_have_the_same_micro_batches():
    mesh = Mesh(8, 2, 2, 2)
    assert mesh.sharers == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.streams == mesh.replicas == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.stages == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert Mesh(8, 2, 2).streams == mesh.stages
    with pytest.raises(AssertionError):
        Mesh(8, 4, 1, 2)


def meshes(workers, per_node=0, **asked):
    found = meshes_of(ComputeSection(**asked), workers, RUN, per_node=per_node)
    return [(mesh.ep, mesh.pp, mesh.tp) for mesh in found if mesh.tp > 1 or asked]


def test_heads_may_be_cut_over_the_workers_of_a_machine_that_divide_those_of_keys():
    assert meshes(8) == [(2, 1, 2), (4, 1, 4)]
    assert meshes(8, per_node=2) == [(2, 1, 2)]
    assert meshes(8, tensor_parallel=4) == [(4, 1, 4)]
    assert meshes(8, tensor_parallel=2, expert_parallel=2) == [(2, 1, 2)]
    assert meshes(8, tensor_parallel=2, pipeline=2) == [(2, 2, 2)]
    assert meshes(2, tensor_parallel=1) == [(1, 1, 1), (1, 2, 1), (2, 1, 1)]
    assert {tp for _, _, tp in meshes(8, shard="state")} == {1}
    assert {tp for _, _, tp in meshes(8, moments="int8")} == {1}


@pytest.mark.parametrize(
    "workers, asked, words",
    [
        (8, {"tensor_parallel": 8}, "8: it has to divide the 4 key/value heads"),
        (6, {"tensor_parallel": 4}, "4: it has to divide the 6 workers of a machine"),
        (0, {"tensor_parallel": 2}, "2: it has to divide the missing workers"),
        (
            8,
            {"tensor_parallel": 2, "expert_parallel": 4},
            "2 and compute.expert_parallel cannot be",
        ),
        (8, {"tensor_parallel": 2, "shard": "state"}, '2 and compute.shard = "state" cannot be'),
        (8, {"tensor_parallel": 2, "moments": "int8"}, '2 and compute.moments = "int8" cannot be'),
        (6, {"tensor_parallel": 2, "pipeline": 2}, "4, the product of compute.pipeline = 2 and"),
    ],
    ids=str,
)
def test_heads_that_cannot_be_cut_so_are_refused(workers, asked, words):
    with pytest.raises(ConfigError, match=words):
        meshes(workers, **asked)


def test_tokens_of_a_sequence_are_cut_evenly():
    odd = run_of(data={"sequence_length": 18}, train={"batch_tokens": 72})
    with pytest.raises(ConfigError, match="4: it has to divide the 18 tokens of a sequence"):
        meshes_of(ComputeSection(tensor_parallel=4), 4, odd)
    assert [mesh.tp for mesh in meshes_of(ComputeSection(), 4, odd) if mesh.tp > 1] == [2]


def test_no_more_ranks_share_the_heads_than_there_are_experts():
    few = run_of(model={"num_experts": 2})
    with pytest.raises(ConfigError, match="4: it must not exceed the 2 experts"):
        meshes_of(ComputeSection(tensor_parallel=4), 4, few)


# ------------------------------------------------ the values of one process


@pytest.mark.parametrize(
    "run, options",
    [
        pytest.param(RUN, {}, id="two"),
        pytest.param(INFLUENCES, {}, id="two, every influence on routing", marks=SLOW),
        pytest.param(run_of(**MASKED), {}, id="two, documents and padding", marks=SLOW),
        pytest.param(RUN, {"recompute": "layer"}, id="two, layers again", marks=SLOW),
        pytest.param(run_of(**ONE_NORM), {}, id="two, one norm over all heads", marks=SLOW),
        pytest.param(RUN, {"workers": 4, "ep": 4, "tp": 4}, id="four", marks=SLOW),
        pytest.param(run_of(**ALONE), {"workers": 4}, id="two by two", marks=SLOW),
        pytest.param(run_of(**ALONE), {"workers": 4, "pp": 2}, id="in two stages"),
        pytest.param(run_of(**MUON), {}, id="two, Muon"),
        pytest.param(run_of(**MUON, **ALONE), {"workers": 4, "pp": 2}, id="Muon", marks=SLOW),
        pytest.param(INFLUENCES, {"workers": 4, "pp": 2}, id="stages, all", marks=SLOW),
        pytest.param(
            run_of(layers=4, run=SEEDED, **ALONE),
            {"workers": 4, "pp": 2, "schedule": "interleaved", "chunks": 2},
            id="interleaved stages",
            marks=SLOW,
        ),
        pytest.param(
            run_of(train={"micro_batch_sequences": 1, "batch_tokens": 5 * 16}),
            {"workers": 8, "pp": 2},
            id="two groups of two stages",
            marks=SLOW,
        ),
        pytest.param(
            run_of(model={"tie_word_embeddings": True}, **ALONE),
            {"workers": 8, "pp": 2, "schedule": "gpipe"},
            id="two groups of two stages, tied",
            marks=SLOW,
        ),
    ],
)
def test_in_fp32_five_steps_are_those_of_one_process(cut, run, options):
    """Within 2 % of the learning rate, because outputs are sums over the ranks in another order."""
    engine = cut(run, OWNED, **options)
    assert_as_one_process(run, engine)
    assert engine.traffic["attention outputs"][0] > 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="two"),
        pytest.param({"workers": 4, "ep": 4, "tp": 4}, id="four", marks=SLOW),
        pytest.param({"workers": 8, "pp": 2}, id="two groups of two stages", marks=SLOW),
    ],
)
def test_in_bf16_the_loss_of_five_steps_is_that_of_one_process(cut, options):
    """At the learning rate of a real run.

    Sums of outputs are rounded differently from one process, and AdamW turns a gradient that is all
    rounding into a whole step. At ten times the rate the losses differ by up to 0.006.
    """
    run, lr = run_of(**BF16), LR / 10
    engine, straight = cut(run, OWNED, **options), new_engine(run, OWNED)
    for step in range(5):
        if step == 3:
            engine.own(THEN)
            straight.own(THEN)
        mine, other = (each.step(batch(run, step), lr=lr) for each in (engine, straight))
        assert mine.grad_norm > run.optimizer.clip_norm
        assert mine.loss == pytest.approx(other.loss, abs=1e-3)
    assert engine.traffic["attention outputs"][0] > 0


CONTROLS = RoutingControls(noise_seed=7, capacity_factor=0.9, probe=True, draw_apart=True)
INFLUENCED = {
    "model": {"noisy_top_k": True, "num_experts": 5, "num_experts_per_tok": 3},
    "train": {"micro_batch_sequences": 4, "batch_tokens": 8 * 16},
    "loss": {"similarity_weight": 0.5},
}


@pytest.mark.parametrize(
    "recompute, more",
    [("none", {}), ("routing", {**ONE_NORM["model"], "tie_word_embeddings": True})],
    ids=["", "layers again, one norm over all heads, tied"],
)
def test_ranks_decide_as_one_process(recompute, more):
    """Capacity, noise, the compared pairs, and an evaluation, with four ranks as two by two."""
    run = run_of(**{**INFLUENCED, "model": {**INFLUENCED["model"], **more}})

    def found(engine):
        stats = [engine.step(batch(run, k), lr=LR, controls=CONTROLS) for k in range(2)]
        assert all(each.dropped and each.pairs for each in stats)
        names = [name for name in all_names(run) if "self_attn" in name]
        return stats, engine.evaluate(batch(run, 5)), engine.read(names)

    expected = found(new_engine(run, (1, 3)))
    for stats, loss, values in together(
        4, lambda ranks: found(engine_of(ranks, run, recompute=recompute))
    ):
        for mine, other in zip(stats, expected[0], strict=True):
            assert mine.loss == pytest.approx(other.loss, rel=1e-5)
            assert (mine.dropped, mine.expert_tokens) == (other.dropped, other.expert_tokens)
            assert [each[:2] for each in mine.pairs] == [each[:2] for each in other.pairs]
        assert loss == pytest.approx(expected[1], rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[2][name], rtol=0, atol=0.02 * LR)


# ------------------------------------------------ the experts of a layer


def shared_layer(ranks, owned=(0, 2, 3), compute="fp32", frozen="fp32"):
    bank = functools.partial(SharedBank, group=ranks)
    pieces = Pieces(bank, tokens=SharedTokens(ranks))
    storage = Storage(frozen, DTYPES[compute], torch.device("cpu"), pieces)
    return filled(SparseMLP(SEVEN.model, storage), owned)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "form, tolerance, number, controls",
    [
        ({}, CLOSE, 60, COMPARED),
        ({"frozen": "int8"}, CLOSE, 20, RoutingControls(capacity_factor=0.8)),
        ({"compute": "bf16", "frozen": "bf16"}, CLOSE_BF16, 20, None),
        ({"owned": (4,)}, CLOSE, 1, None),
    ],
    ids=["compared", "int8, dropped", "bf16", "one token each, of no expert on some ranks"],
)
def test_outputs_and_gradients_of_experts_are_those_of_one_process(
    size, form, tolerance, number, controls
):
    """Each rank has a number of consecutive tokens."""
    whole, all_tokens = whole_layer(**form), tokens(0, size * number)
    out, routing, dx = passed(whole, all_tokens, controls)

    def work(ranks):
        layer = shared_layer(ranks, **form)
        part = lambda all_1ND: all_1ND.chunk(size, 1)[ranks.rank]  # noqa: E731
        return passed(layer, all_tokens, controls, part=part), layer

    layers, held = together(size, work), {}
    for index, whole_1ND in enumerate((out, dx)):
        found = torch.cat([each[2 * index] for each, _ in layers], 1)
        torch.testing.assert_close(found, whole_1ND, **tolerance)
    router = sum(layer.gate.weight.grad for _, layer in layers)
    torch.testing.assert_close(router, whole.gate.weight.grad, **tolerance)
    for (_, decided, _), layer in layers:
        assert torch.equal(decided.expert_NK, routing.expert_NK)
        if controls and controls.probe:
            assert torch.equal(decided.pair_P2, routing.pair_P2) and len(routing.pair_P2)
            torch.testing.assert_close(decided.similarity, routing.similarity, rtol=1e-3, atol=1e-3)
        held |= masters(layer)
    expected = masters(whole)
    assert held.keys() == expected.keys()
    for expert, each in expected.items():
        torch.testing.assert_close(held[expert], each, **tolerance)


# ------------------------------------------------ what moves

FORWARD = ("attention inputs", "attention outputs", "routing", "expert inputs", "expert outputs")


@pytest.mark.parametrize(
    "recompute, sections, size",
    [
        ("none", {}, 2),
        ("routing", {}, 2),
        ("none", {"train": BF16["train"]}, 2),
        ("layer", ONE_NORM, 4),
    ],
    ids=str,
)
def test_a_layer_and_micro_batch_take_five_pairs_and_as_many_bytes_as_planned(
    recompute, sections, size
):
    """Pairs of gather and reduce-scatter: for two inputs, two outputs and the routing of each
    token. With recomputing, all operations before the experts' outputs run again. A QK-norm over
    all heads takes two sums forward and two backward, of one number per token.
    """
    run = run_of(**sections)

    def work(ranks):
        engine = engine_of(ranks, run, ep=size, tp=size, recompute=recompute)
        ranks.traffic.take()
        engine.step(batch(run, 0), lr=LR)
        return ranks.traffic.take()

    layers, micro_batches, num_tokens = run.model.num_hidden_layers, 2, 2 * 16
    each, again = layers * micro_batches, recompute != "none"
    for found in together(size, work):
        counts = {kind: number for kind, (number, _) in found.items()}
        expected = dict.fromkeys(FORWARD, each * (2 if again else 1))
        expected["expert outputs"] = each
        expected |= {f"gradients of {kind}": each for kind in FORWARD}
        if sections == ONE_NORM:
            expected |= {"norms": 4 * each * (1 + again), "norm gradients": 4 * each}
        assert {kind: counts.pop(kind) for kind in expected} == expected
        # Losses of the tokens of each rank; gradients of what is not cut; losses, norms, and those
        # of the experts.
        assert counts == {"losses": 2 * micro_batches, "sums": 2, "numbers": 3}
        sent = sum(found[kind][1] for kind in expected)
        itemsize = DTYPES[run.train.compute].itemsize
        planned = sums_bytes(num_tokens, run.model, itemsize, size, again=again)
        assert sent == pytest.approx(each * planned, rel=0.02)


def test_between_stages_each_rank_sends_its_tokens(cut):
    """And the table of the losses' terms from the routers of the first of two layers."""
    run = run_of(**ALONE)
    engine = cut(run, OWNED, workers=4, pp=2)
    engine.step(batch(run, 0), lr=LR)
    table = 2 * run.model.num_experts + 3
    each = 4 * (16 * run.model.hidden_size // 2 + table)
    assert engine.traffic["stage outputs"] == (4, 4 * each)


# ------------------------------------------------ necessary operations


def after_two_steps(run, kind=HeadsEngine):
    def work(ranks):
        engine = engine_of(ranks, run, kind=kind)
        norms = [engine.step(batch(run, k), lr=LR).grad_norm for k in range(2)]
        return engine.read(all_names(run)[: len(shared_shapes(run.model))]), norms

    return together(2, work)


def furthest(values, expected, part=""):
    named = {name: value for name, value in values.items() if part in name}
    return max((value - expected[name]).abs().max().item() for name, value in named.items())


def without_the_sum_of(part):
    """An engine that does not sum the gradients of some tensors over ranks."""

    class OfOwnTokens(HeadsEngine):
        def _add_up(self):
            own = {n: g.clone() for n, g in self._gradients_by_name().items() if part in n}
            super()._add_up()
            for name, gradient in self._gradients_by_name().items():
                gradient.copy_(own.get(name, gradient))

    return OfOwnTokens


@pytest.mark.parametrize("run", [RUN, run_of(model={"noisy_top_k": True}, run=SEEDED)])
def test_a_gradient_that_is_not_summed_over_the_heads_or_tokens_of_all_ranks_is_noticed(run):
    """Over heads for a QK-norm. Over tokens for the other norms, the router, embedding and head."""
    straight = new_engine(run, (1, 3))
    norms = [straight.step(batch(run, k), lr=LR).grad_norm for k in range(2)]
    expected = straight.read(list(shared_shapes(run.model)))
    for values, found in after_two_steps(run):
        assert furthest(values, expected) < 0.02 * LR
        assert found == pytest.approx(norms, rel=1e-5)
    kinds = ["q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "gate.weight"]
    kinds += ["model.norm", "embed_tokens", "lm_head"]
    kinds += ["gate.noise_weight"] * run.model.noisy_top_k
    for part in kinds:
        for values, _ in after_two_steps(run, without_the_sum_of(part)):
            assert furthest(values, expected, part) > 0.1 * LR, part


def noise_of_a_rank(seed, num_tokens, num_experts):
    return gaussian(seed, num_tokens // 2, num_experts).repeat(2, 1)


def capacity_of_a_rank(expert_NK, num_experts, capacity):
    halves = expert_NK.chunk(2)
    return torch.cat([within_capacity(half, num_experts, -(-capacity // 2)) for half in halves])


@pytest.mark.parametrize(
    ("what", "local"), [("gaussian", noise_of_a_rank), ("within_capacity", capacity_of_a_rank)]
)
def test_what_goes_by_the_number_of_a_token_on_its_rank_is_noticed(monkeypatch, what, local):
    """Noise and capacity depend on a token's place in the whole micro-batch."""
    run = run_of(**INFLUENCED)

    def found(engine):
        stats = engine.step(batch(run, 0), lr=LR, controls=CONTROLS)
        return stats.expert_tokens, stats.dropped

    expected = found(new_engine(run, (1, 3)))
    assert together(2, lambda ranks: found(engine_of(ranks, run))) == [expected] * 2
    monkeypatch.setattr(moe, what, local)
    assert expected not in together(2, lambda ranks: found(engine_of(ranks, run)))


def test_norms_of_what_is_cut_are_of_the_whole_and_the_same_on_all_ranks():
    def work(ranks):
        engine = engine_of(ranks, RUN)
        for name, parameter in engine._model.trained_parameters().items():
            generator = torch.Generator().manual_seed(len(name))
            shape = engine._heads.whole_shape(name, tuple(parameter.shape))
            whole = torch.randn(shape, generator=generator)
            parameter.grad = engine._heads.part(name, whole).clone()
        return engine._norms(1.0)

    first, second = together(2, work)
    assert first == second
    stacks = {owned_stack(layer, kind) for layer in range(2) for kind in ("gate", "up", "down")}
    straight = new_engine(RUN, (1, 3))
    for name, parameter in straight._model.trained_parameters().items():
        generator = torch.Generator().manual_seed(len(name))
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    expected = straight._norms(1.0)
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[name], expected[name]) for name in first.keys() - stacks)


# ------------------------------------------------ whole tensors by name


def test_parts_of_heads_make_whole_tensors_and_are_written_anywhere():
    values = initial_tensors(RUN, [Q, K, V, OUT])

    def work(ranks):
        engine = engine_of(ranks, RUN)
        read = engine.read(list(values))
        local = {name: engine._model.read([name])[name].shape for name in values}
        for name in values:
            for start, stop in ((0, 5), (30, 100), (len(values[name].view(-1)) - 7, None)):
                part = Slice(name, start, stop or len(values[name].view(-1)))
                engine.write_part(part, torch.arange(float(part.stop - part.start)))
        return read, local, engine.read(list(values)), engine.shape(OUT)

    expected = {name: value.clone() for name, value in values.items()}
    for value in expected.values():
        flat = value.view(-1)
        flat[:5], flat[30:100], flat[-7:] = torch.arange(5), torch.arange(70), torch.arange(7)
    for read, local, written, shape in together(2, work):
        assert same(read, values)
        assert same(written, expected)
        assert local == {Q: (16, 16), K: (8, 16), V: (8, 16), OUT: (16, 16)}
        assert shape == (16, 32)


def test_a_whole_tensor_of_another_shape_is_refused():
    def work(ranks):
        engine = engine_of(ranks, RUN)
        with pytest.raises(BadBlob, match=r"o_proj.weight is \(32, 16\); expected \(16, 32\)"):
            engine.write({OUT: torch.zeros(32, 16)})
        assert not AttentionHeads(replace(ranks, size=1), RUN.model).cuts(OUT)

    together(2, work)


@pytest.mark.parametrize("options", [{}, pytest.param({"workers": 4, "pp": 2}, marks=SLOW)])
def test_who_holds_a_part_of_a_tensor_reads_and_writes_it(cut, options):
    engine = cut(RUN, OWNED, **options)
    train(engine, RUN, range(2))
    shared = [Q, OUT, "model.layers.1.self_attn.q_norm.weight", "model.norm.weight"]
    shared[2] = "model.layers.0.input_layernorm.weight"
    assert_holders_answer(engine, RUN, shared)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"moments": "bf16"}, marks=SLOW),
        pytest.param({"workers": 8, "pp": 2}, marks=SLOW),
    ],
    ids=str,
)
def test_a_state_goes_on_in_one_process_bit_for_bit_and_comes_back(cut, options):
    engine = cut(RUN, OWNED, **options)
    resident = new_engine(RUN, moments=options.get("moments", "fp32"))
    train(engine, RUN, range(2))
    engine.own(THEN)
    train(engine, RUN, [2])
    handed_on(engine, resident, RUN)
    handed_on(resident, cut(RUN, [2], **options), RUN)


def test_int8_moments_of_another_engine_are_taken_in_fp32(cut):
    rounded, engine = new_engine(RUN, OWNED, moments="int8"), cut(RUN)
    train(rounded, RUN, range(2))
    straight = new_engine(RUN)
    for each in (straight, engine):
        each.load_state_dict(rounded.state_dict())
    assert same(tensors(engine), tensors(straight))


@SLOW
def test_a_state_in_parts_goes_on_in_every_engine(cut, tmp_path):
    engine = cut(RUN, OWNED)
    train(engine, RUN, range(2))
    engine.own(THEN)
    train(engine, RUN, [2])
    others = [cut(RUN, ep=1, tp=1), cut(RUN), cut(RUN, workers=4, pp=2), new_engine(RUN)]
    saved_and_resumed(engine, tmp_path / "private", others, RUN)
    losses = [train(each, RUN, [7])[0].loss for each in (engine, *others)]
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-5)


# ------------------------------------------------ faults


@pytest.mark.parametrize("options", [{}, pytest.param({"workers": 4, "pp": 2}, marks=SLOW)])
def test_texts_of_any_length_are_evaluated(cut, options):
    """Also a text that the ranks cannot share evenly, with some uncounted predictions."""
    engine, straight = cut(RUN, OWNED, **options), new_engine(RUN, OWNED)
    for length in (1, 3, 8, 13):
        tokens_BT1 = batch(RUN, 5)[:3, : length + 1]
        scored_BT = torch.ones(3, length, dtype=torch.bool)
        scored_BT[1, : length // 2] = False
        for scored in (None, scored_BT):
            found, expected = (
                each.evaluate(tokens_BT1, scored_BT=scored) for each in (engine, straight)
            )
            assert found == pytest.approx(expected, rel=1e-5)


def test_agreed_values_stand_in_for_masters_in_an_evaluation():
    tokens_BT1, straight = batch(RUN, 5), new_engine(RUN, (1, 3))
    names = [name for expert in (1, 3) for name in expert_shapes(RUN.model, expert)]
    agreed = {name: 20 * value for name, value in straight.read(names).items()}

    def found(engine):
        return engine.evaluate(tokens_BT1, agreed=agreed.__getitem__), engine.evaluate(tokens_BT1)

    expected = found(straight)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)
    for each in together(2, lambda ranks: found(engine_of(ranks, RUN))):
        assert each == pytest.approx(expected, rel=1e-6)


@SLOW
def test_a_step_that_is_not_finite_changes_nothing_anywhere(cut):
    assert_nan_changes_nothing(cut(RUN, OWNED), RUN, Q)


@SLOW
def test_a_worker_that_is_killed_in_a_step_costs_no_bit(cut, caplog):
    """Also after a change of ownership, which the new workers repeat."""
    engine, straight = cut(RUN, OWNED), cut(RUN, OWNED)
    for each in (engine, straight):
        train(each, RUN, range(2))
        each.own(THEN)
    assert_a_kill_costs_nothing(engine, straight, RUN, 1, caplog)
    assert same(engine.read(all_names(RUN)), straight.read(all_names(RUN)))
    assert same(tensors(engine), tensors(straight))
