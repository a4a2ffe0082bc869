"""Host memory that a GPU copies from: pinned, or an error of its own."""

import pytest
import torch

from swarm.train.engine.host_memory import Arena


def test_memory_that_cannot_be_pinned_leaves_no_error_for_the_next_launch(monkeypatch):
    kept = []

    class Code:
        """As torch binds `cudaError_t`, without names of errors."""

        def __int__(self):
            return 2

        def __str__(self):
            return "cudaError.???"

    class Runtime:
        def cudaHostRegister(self, *_):
            kept.append("CUDA error: out of memory")
            return Code()

    def launch(*_, **__):
        if kept:
            raise RuntimeError(kept.pop())

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "ones", launch)
    with pytest.raises(MemoryError, match=r"64 bytes of host memory cannot be pinned \(2\)"):
        Arena(64, pinned=True)
    launch()


@pytest.mark.gpu
def test_a_gpu_computes_on_after_memory_could_not_be_pinned():
    buffer = torch.zeros(2**20, dtype=torch.uint8)
    arena = Arena.of(buffer, pinned=True)
    with pytest.raises(MemoryError, match="cannot be pinned"):
        Arena.of(buffer, pinned=True)
    assert torch.arange(4, device="cuda").sum().item() == 6
    arena.close()
