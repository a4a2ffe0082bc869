"""A model to export."""

import pytest

from swarm.config import RunConfig
from swarm.network.blobs.blob_store import BlobStore
from swarm.peer.text.agreed_model import AgreedModel
from swarm.protocol.values.layout import Layout, layout_of
from tests.export import models
from tests.peers.exports import HELD_OUT, small_demo


@pytest.fixture
def run() -> RunConfig:
    return small_demo()


@pytest.fixture
def layout(run: RunConfig) -> Layout:
    return layout_of(run)


@pytest.fixture
def found(run: RunConfig) -> AgreedModel:
    store = BlobStore()
    return AgreedModel(run, models.found(store, run, HELD_OUT), store)
