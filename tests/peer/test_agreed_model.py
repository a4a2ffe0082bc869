"""Who reads the agreed model reads values alone."""

from pathlib import Path
from types import SimpleNamespace

import torch

from swarm.codecs import MOMENTUM, bytes_of
from swarm.config import OuterConfig
from swarm.network.blobs import BlobStore
from swarm.peer.agreed_model import named_tensors
from swarm.peer.live_model import initial_contents
from swarm.protocol.layout import layout_of
from tests.model.samples import tiny_run


def test_momenta_are_not_in_an_export(tmp_path: Path) -> None:
    """Exports and evaluations read `named_tensors`: all of the model, in its values' bits."""
    run = tiny_run()
    wire = run.wire.model_copy(update={"shared_coding": "b2", "part_bytes": 4096})
    outer = OuterConfig(momentum=128, rate=128)
    run = run.model_copy(update={"wire": wire, "outer": outer})
    layout, store, entries = layout_of(run), BlobStore(tmp_path), {}
    plain = layout_of(run.model_copy(update={"outer": OuterConfig()}))
    expected = dict(initial_contents(run, plain))
    for unit, content in initial_contents(run, layout):
        blob, part = content.whole(), layout.by_unit[unit]
        values = expected[unit].whole()
        momenta = b"" if part.outer is None else bytes(MOMENTUM.itemsize * part.num_elements)
        assert blob == values + momenta  # the momentum begins at zero
        momenta = bytes_of(torch.full((len(momenta) // 2,), 3.0, dtype=MOMENTUM)).tobytes()
        entries[unit] = SimpleNamespace(digest=store.put(values + momenta))
    assert any(part.outer for part in layout.units)
    manifest = SimpleNamespace(entries=entries, round=1)
    read = dict(named_tensors(layout, manifest, store))  # type: ignore[arg-type]
    assert {name: tensor.shape for name, tensor in read.items()} == layout.shapes
    entries = {unit: SimpleNamespace(digest=store.put(c.whole())) for unit, c in expected.items()}
    manifest = SimpleNamespace(entries=entries, round=1)
    again = dict(named_tensors(plain, manifest, store))  # type: ignore[arg-type]
    assert all(torch.equal(read[name], again[name]) for name in again)
