"""Tokens that travel to the ranks of their experts: the values of one process, and the traffic."""

import functools
import zlib
from dataclasses import replace

import pytest
import torch

from swarm.experts import (
    ADAMW_MOMENTS,
    PROJECTIONS,
    expert_of,
    expert_shapes,
    expert_tensor,
    owned_stack,
    stacked_tensors,
)
from swarm.model.initial_weights import initial_tensors
from swarm.model.moe import Pieces, Recall, SparseMLP, Storage
from swarm.model.routing import RoutingControls
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.parallel.data_parallel import RankEngine
from swarm.train.parallel.dispatch import DealtBank, crossing_bytes
from tests.train.runs import all_names, batch, new_engine, same, tiny_run
from tests.train.team import together

SIZES = {"num_experts": 7, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
RUN = tiny_run(model={**SIZES, "num_hidden_layers": 1})
OWNED = (0, 2, 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def whole_layer(owned=OWNED, compute="fp32", frozen="fp32"):
    layer = SparseMLP(RUN.model, Storage(frozen, DTYPES[compute], torch.device("cpu")))
    return filled(layer, owned)


def dealt_layer(ranks, owned=OWNED, compute="fp32", frozen="fp32"):
    pieces = Pieces(functools.partial(DealtBank, group=ranks))
    storage = Storage(frozen, DTYPES[compute], torch.device("cpu"), pieces)
    return filled(SparseMLP(RUN.model, storage), owned)


def filled(layer, owned):
    """Has the run's initial weights. Experts that change their rank bring theirs."""
    weights = initial_tensors(RUN, all_names(RUN))
    with torch.no_grad():
        layer.gate.weight.copy_(weights["model.layers.0.mlp.gate.weight"] * 20)
        for expert in layer.experts.row_of:
            for kind in ("gate", "up", "down"):
                name = f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight"
                stack, row = layer.experts.place(expert, f"{kind}_proj")
                stack.put(row, weights[name] * 10)
    layer.experts.own(owned)
    return layer


def tokens(rank, number=50):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(1, number, RUN.model.hidden_size, generator=generator)


def passed(layer, x_BTD, controls=None, recall=None, part=lambda all_BTD: all_BTD):
    """Output, routing and gradient of the input of one pass; parameters have theirs.

    `part` are the tokens for the layer.
    """
    weight = part(torch.linspace(-1, 1, x_BTD.numel()).view_as(x_BTD))
    x_BTD = part(x_BTD).clone().requires_grad_()
    out_BTD, routing = layer(x_BTD, recall, controls)
    loss = (out_BTD * weight).sum() + routing.probabilities_NE.square().sum()
    if controls and controls.draw_apart and len(routing.similarity):
        loss = loss + routing.similarity.sum()
    loss.backward()
    return out_BTD.detach(), routing, x_BTD.grad


def masters(layer):
    """Expert -> gradients of its matrices."""
    bank = layer.experts
    return {
        expert: [matrix.grad[row] for matrix in bank.masters()]
        for row, expert in enumerate(bank.owned_here)
    }


def assert_as_whole(size, numbers, tolerance, controls=None, **form):
    """Compares with one process that computes the tokens of one rank after the other.

    Returns the number of pairs of experts that each rank compared.
    """
    whole, expected = whole_layer(**form), []
    for rank, number in enumerate(numbers):
        expected.append(passed(whole, tokens(rank, number), controls))

    def work(ranks):
        layer = dealt_layer(ranks, **form)
        return passed(layer, tokens(ranks.rank, numbers[ranks.rank]), controls), layer

    found = together(size, work)
    gradients, router = masters(whole), whole.gate.weight.grad
    held = {}
    for (out, routing, dx), (expected_out, expected_routing, expected_dx) in zip(
        [each for each, _ in found], expected, strict=True
    ):
        torch.testing.assert_close(out, expected_out, **tolerance)
        torch.testing.assert_close(dx, expected_dx, **tolerance)
        assert torch.equal(routing.expert_NK, expected_routing.expert_NK)
        if controls and controls.probe:
            torch.testing.assert_close(
                routing.similarity, expected_routing.similarity, rtol=1e-3, atol=1e-3
            )
    for _, layer in found:
        held |= masters(layer)
    assert held.keys() == gradients.keys()
    for expert, each in gradients.items():
        torch.testing.assert_close(held[expert], each, **tolerance)
    torch.testing.assert_close(
        sum(layer.gate.weight.grad for _, layer in found), router, **tolerance
    )
    routings = [routing for (_, routing, _), _ in found]
    return [0 if each.similarity is None else len(each.similarity) for each in routings]


CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # fp32 sums of some hundred terms in another order
CLOSE_BF16 = {"rtol": 3e-2, "atol": 3e-2}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "form, tolerance",
    [({}, CLOSE), ({"frozen": "int8"}, CLOSE), ({"compute": "bf16", "frozen": "bf16"}, CLOSE_BF16)],
)
def test_outputs_and_gradients_are_those_of_one_process(size, form, tolerance):
    assert_as_whole(size, [50, 20, 33][:size], tolerance, **form)


def test_experts_are_frozen_on_ranks_that_own_none():
    assert_as_whole(3, [50, 20, 33], CLOSE, owned=(4,))


def test_a_rank_without_tokens_computes_for_the_others():
    assert_as_whole(2, [40, 0], CLOSE)


def test_capacity_is_that_of_the_tokens_of_one_rank():
    assert_as_whole(2, [50, 20], CLOSE, RoutingControls(capacity_factor=0.8))


# ------------------------------------------------ compared experts

COMPARED = RoutingControls(probe=True, draw_apart=True)


def test_experts_of_other_ranks_are_compared_and_drawn_apart():
    assert min(assert_as_whole(2, [120, 90], CLOSE, COMPARED)) > 1


def test_a_rank_that_has_no_pairs_to_compare_takes_part_all_the_same():
    """Forward and backward, because its experts' gradients come from the other rank's tokens."""
    for few in (8, 0):
        pairs = assert_as_whole(2, [120, few], CLOSE, COMPARED)
        assert pairs[0] > 1 and pairs[1] == 0


# ------------------------------------------------ traffic

EXPERT_KINDS = ("counts", "tokens", "outputs", "output gradients", "token gradients")


def engine_of(ranks, run, ep=2, owned=(1, 3), kind=RankEngine, **options):
    engine = kind(run, replace(EngineOptions.of(run), ep=ep, **options), ranks)
    engine.write(initial_tensors(run, all_names(run)))
    engine.own(owned)
    return engine


@pytest.mark.parametrize("recompute, number", [("none", 5), ("routing", 7), ("layer", 7)])
def test_a_layer_and_micro_batch_take_seven_operations_at_most(recompute, number):
    run = tiny_run()

    def work(ranks):
        engine = engine_of(ranks, run, recompute=recompute)
        ranks.traffic.take()
        engine.step(batch(run, 0), lr=1e-2)
        return ranks.traffic.take()

    for found in together(2, work):
        each = {kind: found[kind][0] for kind in EXPERT_KINDS}
        layers = run.model.num_hidden_layers  # and one micro-batch on each rank
        assert sum(each.values()) == number * layers <= 7 * layers
        assert found.keys() - set(EXPERT_KINDS) == {"sums", "numbers"}
        assert (found["sums"][0], found["numbers"][0]) == (2, 2)


@pytest.mark.parametrize("draw_apart, number", [(False, 3), (True, 4)])
def test_comparing_experts_takes_four_more(draw_apart, number):
    run = tiny_run(loss={"similarity_weight": 0.5})
    controls = RoutingControls(probe=True, draw_apart=draw_apart)

    def work(ranks):
        engine = engine_of(ranks, run)
        ranks.traffic.take()
        engine.step(batch(run, 0), lr=1e-2, controls=controls)
        return ranks.traffic.take()

    for found in together(2, work):
        compared = sum(count for kind, (count, _) in found.items() if "compared" in kind)
        assert compared + found["counts"][0] - 2 == number * run.model.num_hidden_layers


@pytest.mark.parametrize("compute, again", [("fp32", False), ("fp32", True), ("bf16", True)])
def test_bytes_are_those_of_the_formula(compute, again):
    number = 400

    def work(ranks):
        layer = dealt_layer(ranks, compute=compute)
        x_BTD = tokens(ranks.rank, number)
        recall = Recall()
        ranks.traffic.take()
        _, routing, _ = passed(layer, x_BTD, recall=recall)
        if again:
            with torch.no_grad():
                layer(x_BTD, recall)
        here = torch.tensor(sorted(layer.experts.row_of))
        leaving = (~torch.isin(routing.expert_NK, here)).sum().item()
        return leaving, sum(sent for _, sent in ranks.traffic.take().values())

    found = together(2, work)
    itemsize = DTYPES[compute].itemsize
    expected = crossing_bytes(sum(n for n, _ in found), RUN.model, itemsize, again=again)
    assert sum(sent for _, sent in found) == pytest.approx(expected, rel=0.02)
    assert sum(n for n, _ in found) > number  # of 2,400 pairs


# ------------------------------------------------ a change of ownership

ALL, FEW = (0, 1, 2, 3), (0, 1)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_an_expert_that_changes_its_rank_takes_master_and_moments_along(moments):
    run = tiny_run()

    def work(ranks):
        engine = engine_of(ranks, run, owned=ALL, moments=moments)
        for step in range(2):
            engine.step(batch(run, step), lr=1e-2)
        before = {name: tensor.clone() for name, tensor in engine.state_dict().tensors.items()}
        engine.own(FEW)
        return before, dict(engine.state_dict().tensors), engine.state_forms()

    first, second = together(2, work)
    before, after = ({**one, **other} for one, other in zip(first[:2], second[:2], strict=True))
    came = {name for name in second[1] if name not in second[0]}
    assert {expert_of(name.partition(".")[2]) for name in came} == {1}
    assert len(came) == 6 * len(ADAMW_MOMENTS) * (2 if moments == "int8" else 1) + 6
    assert same(after, {name: before[name] for name in after})
    assert {name: (each.dtype, tuple(each.shape)) for name, each in after.items()} == first[2]


@pytest.mark.parametrize("frozen", ["fp32", "bf16", "int8"])
def test_experts_that_freeze_and_move_are_rounded_as_by_one_process(frozen):
    run, straight = tiny_run(), new_engine(tiny_run(), ALL, frozen=frozen)
    for owned in (FEW, (2,), (0, 3)):
        straight.own(owned)

    def work(ranks):
        engine = engine_of(ranks, run, owned=ALL, frozen=frozen)
        for owned in (FEW, (2,), (0, 3)):
            engine.own(owned)
        moved = ranks.traffic.take()["moves"][0]
        return engine.read([n for n in all_names(run) if engine.holds(n)]), moved

    found = {}
    for values, moved in together(2, work):
        found |= values
        assert moved
    expected = straight.read(all_names(run))
    assert same(found, {name: expected[name] for name in found})
    assert found.keys() == expected.keys()


# ------------------------------------------------ faults

UNEVEN = tiny_run(train={"micro_batch_sequences": 1, "batch_tokens": 3 * 16})


def losses_of(run, kind, controls=None, recompute="none"):
    def work(ranks):
        engine = engine_of(ranks, run, kind=kind, recompute=recompute)
        return [engine.step(batch(run, k), lr=1e-2, controls=controls).loss for k in range(2)]

    engine = new_engine(run, (1, 3))
    straight = [engine.step(batch(run, k), lr=1e-2, controls=controls).loss for k in range(2)]
    return straight, together(2, work)


class SkipsIdle(RankEngine):
    """Leaves out the operations of micro-batches that only others of its group have."""

    def _idle(self, count):
        return 0


def test_an_idle_rank_that_skips_an_operation_is_noticed():
    for recompute in ("none", "routing"):
        straight, found = losses_of(UNEVEN, RankEngine, COMPARED, recompute)
        assert all(each == pytest.approx(straight, rel=1e-6) for each in found)
    with pytest.raises((AssertionError, RuntimeError)):
        losses_of(UNEVEN, SkipsIdle)


def test_an_evaluation_with_agreed_values_takes_those_of_other_ranks_too():
    """With three micro-batches, one rank has one. Its experts use agreed values for the others'."""
    tokens_BT1, straight = batch(UNEVEN, 5), new_engine(UNEVEN, (1, 3))
    scored_BT = torch.ones_like(tokens_BT1[:, 1:], dtype=torch.bool)
    scored_BT[1, 4:] = False
    names = [name for expert in (1, 3) for name in expert_shapes(UNEVEN.model, expert)]
    agreed = {name: 3 * value for name, value in straight.read(names).items()}

    def found(engine):
        given = {"scored_BT": scored_BT, "agreed": agreed.__getitem__}
        return engine.evaluate(tokens_BT1, **given), engine.evaluate(tokens_BT1)

    expected = found(straight)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)
    for each in together(2, lambda ranks: found(engine_of(ranks, UNEVEN))):
        assert each == pytest.approx(expected, rel=1e-6)


class LocalNoise(RankEngine):
    """Draws noise by a micro-batch's number on its rank."""

    def _backward(self, parts, index, controls):
        first = self._ranks.block(len(parts)).start
        return super()._backward(parts[first:], index - first, controls)


def test_noise_by_the_local_number_of_a_micro_batch_is_noticed():
    run = tiny_run(model={"noisy_top_k": True})
    controls = RoutingControls(noise_seed=7)
    straight, found = losses_of(run, RankEngine, controls)
    assert all(each == pytest.approx(straight, rel=1e-6) for each in found)
    _, wrong = losses_of(run, LocalNoise, controls)
    assert not any(each == pytest.approx(straight, rel=1e-4) for each in wrong)


def test_norms_of_shards_are_formed_in_fp64():
    run = tiny_run()

    def work(ranks):
        engine = engine_of(ranks, run, owned=(0, 1, 3))
        for name, parameter in zip(
            engine._optimizer.names, engine._optimizer.parameters, strict=True
        ):
            experts = stacked_tensors(name, engine._model.owned_here)
            each = [gradient_of(n) for n in experts] or [torch.zeros_like(parameter)]
            parameter.grad = torch.stack(each).view_as(parameter)
        return engine._norms(1.0)

    def gradient_of(name):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(16, 16, generator=generator)

    first, second = together(2, work)
    assert first.keys() == second.keys()
    for layer in range(2):
        for kind in PROJECTIONS:
            names = [expert_tensor(layer, expert, kind) for expert in (0, 1, 3)]
            whole = torch.cat([gradient_of(name).double() for name in names]).norm().float()
            found = [norms[owned_stack(layer, kind)] for norms in (first, second)]
            assert torch.equal(found[0], whole) and torch.equal(found[1], whole)
