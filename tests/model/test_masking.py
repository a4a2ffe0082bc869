"""Attention within documents: a window of several documents equals each document alone."""

import contextlib
import time

import pytest
import torch
from torch import Tensor
from torch.backends import cuda

from swarm.model.attention import attend
from swarm.model.initial_weights import initial_tensors
from swarm.model.losses import output_losses
from swarm.model.masking import WASTE, Documents, Masked, documents_of
from swarm.model.transformer import Recompute, Transformer
from tests.model.samples import OnGpu
from tests.train.runs import all_names, tiny_run

END = 0
RUN = tiny_run(loss={"balance_weight": 0.0})
"""Balancing is over all tokens of a micro-batch together, so it differs where these do."""


def window(*documents: int, seed: int = 0) -> Tensor:
    """A window of documents with these numbers of inputs, [1, T + 1].

    Each document but the first begins with the end of the one before.
    """
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(1, 99, (1, sum(documents) + 1), generator=generator)
    found[0, torch.tensor(documents)[:-1].cumsum(0)] = END
    return found


def starts_of(tokens_BT1: Tensor) -> Tensor:
    return tokens_BT1[:, :-1] == END


def model(compute: str = "fp32", recompute: Recompute = "none") -> Transformer:
    made = Transformer(RUN.model, owned=[0, 2], frozen="fp32", compute=compute, recompute=recompute)
    made.write(initial_tensors(RUN, all_names(RUN)))
    return made


def gradients(made: Transformer) -> Tensor:
    found = [p.grad.flatten() for p in made.trained_parameters().values() if p.grad is not None]
    made.zero_grad()
    return torch.cat(found)


@pytest.mark.parametrize(("compute", "rtol"), [("fp32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("recompute", ["none", "layer", "routing"])
def test_documents_of_a_window_have_the_losses_and_gradients_that_they_have_alone(
    compute: str, recompute: Recompute, rtol: float
) -> None:
    made, sizes = model(compute, recompute), (5, 1, 9, 17)
    tokens = window(*sizes)
    documents = documents_of(starts_of(tokens))
    together = made.losses(tokens, RUN.loss, masked=Masked(documents))
    together.total.backward()
    found = gradients(made)
    mean, first = 0.0, 0
    for size in sizes:
        alone = made.losses(tokens[:, first : first + size + 1], RUN.loss)
        (alone.total * size / sum(sizes)).backward()
        mean += alone.cross_entropy.item() * size / sum(sizes)
        first += size
    wanted = gradients(made)
    assert together.cross_entropy.item() == pytest.approx(mean, rel=rtol)
    assert (found - wanted).norm() < rtol * wanted.norm()
    # Without documents the result differs.
    made.losses(tokens, RUN.loss).total.backward()
    assert (gradients(made) - wanted).norm() > 2 * rtol * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_another_document_is_seen(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, 40, 8, generator=generator).to(dtype) for h in (4, 2, 2))
    starts_BT = torch.zeros(2, 40, dtype=torch.bool)
    starts_BT[0, 13] = starts_BT[1, 39] = True
    documents = documents_of(starts_BT)
    assert documents is not None
    before = documents.apply(attend, q, k, v)
    for tensor in (k, v):
        tensor[0, :, :13] = torch.nan
    after = documents.apply(attend, q, k, v)
    assert after.shape == q.shape and after[0, :, :13].isnan().all()
    assert torch.equal(before[0, :, 13:], after[0, :, 13:])
    assert torch.equal(before[1], after[1])
    # Sequences in which no other document begins are computed as usual.
    alone = attend(q[1:, :, :39], k[1:, :, :39], v[1:, :, :39])
    assert torch.allclose(alone.float(), after[1:, :, :39].float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("before", [True, False])
def test_documents_on_a_gpu_are_kept_from_cudnn_whose_plans_are_of_one_shape(before: bool) -> None:
    starts_BT = torch.zeros(1, 16, dtype=torch.bool)
    starts_BT[0, 5] = True
    documents = documents_of(starts_BT)
    assert documents is not None and len(documents.widths) == 2
    asked = []

    def noted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        asked.append(cuda.cudnn_sdp_enabled())
        if len(asked) == 4:
            raise torch.OutOfMemoryError
        return q

    x_BHTC = torch.zeros(1, 2, 16, 8)
    given = [x_BHTC] * 3, [x_BHTC.as_subclass(OnGpu)] * 3
    cuda.enable_cudnn_sdp(before)
    try:
        for tensors in given:
            with contextlib.suppress(torch.OutOfMemoryError):
                documents.apply(noted, *tensors)
        assert asked == [before, before, False, False]
        assert cuda.cudnn_sdp_enabled() == before, "also after an error"
    finally:
        cuda.enable_cudnn_sdp(True)


@pytest.mark.gpu
def test_documents_of_new_lengths_take_no_longer_on_a_gpu_than_known_ones() -> None:
    generator, gpu = torch.Generator().manual_seed(4), torch.device("cuda")
    q, k, v = (
        torch.randn(2, heads, 2048, 64, device=gpu, dtype=torch.bfloat16).requires_grad_()
        for heads in (8, 2, 2)
    )
    found = [documents_of(torch.rand(2, 2048, generator=generator) < 0.01) for _ in range(11)]
    known, *new = [documents.to(gpu) for documents in found if documents is not None]
    assert len({size for documents in new for size in documents.widths}) > 50

    def seconds_of(parts: list[Documents]) -> float:
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for documents in parts:
            documents.apply(attend, q, k, v).sum().backward()
        torch.cuda.synchronize()
        return time.perf_counter() - began_s

    seconds_of([known] * 2)
    repeated_s = seconds_of([known] * 10)
    assert len(new) == 10 and seconds_of(new) < 4 * repeated_s


def test_each_token_has_a_place_and_few_places_are_empty() -> None:
    generator = torch.Generator().manual_seed(2)
    for share in (0.01, 0.1, 0.5, 1.0):
        starts_BT = torch.rand(3, 200, generator=generator) < share
        found = documents_of(starts_BT)
        assert found is not None
        assert torch.equal(found.token_M[found.place_N], torch.arange(600))
        assert len(found.token_M) == sum(s * w for s, w in found.widths) <= WASTE * 600
        assert len(found.widths) <= 16
        first = 0
        starts_N = starts_BT.flatten() | (torch.arange(600) % 200 == 0)
        for many, width in found.widths:
            token_SW = found.token_M[first : first + many * width].view(many, width)
            first += many * width
            assert starts_N[token_SW[:, 0]].all()
            inside = token_SW[:, 1:] > token_SW[:, :-1]
            assert not starts_N[token_SW[:, 1:][inside]].any(), "one document each"
    assert documents_of(torch.zeros(2, 8, dtype=torch.bool)) is None
    only_first = torch.zeros(2, 8, dtype=torch.bool)
    only_first[:, 0] = True
    assert documents_of(only_first) is None


def test_a_mean_over_more_than_there_is_has_the_sum_of_what_is_there() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, head = torch.randn(6, 8, generator=generator), torch.randn(20, 8, generator=generator)
    labels = torch.arange(6)
    whole = output_losses(hidden, head, labels, 0.1)
    share = output_losses(hidden, head, labels, 0.1, 24)
    assert torch.allclose(torch.stack(whole), 4 * torch.stack(share))
    none = output_losses(hidden[:0].requires_grad_(), head, labels[:0], 0.1, 24)
    none[0].backward()
    assert [value.item() for value in none] == [0, 0, 0]
