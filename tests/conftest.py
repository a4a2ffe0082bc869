"""What every test runs under: one thread, no network hub, a home and an environment of its own."""

import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch

SCRATCH_HOME = pytest.StashKey[str]()


def _gpu_was_asked_for(config: pytest.Config) -> bool:
    expression = config.getoption("markexpr").replace("not gpu", "")
    return "gpu" in expression.split()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option of scripts/test: most files need not be loaded to know that none is meant."""
    parser.addoption("--files-with", metavar="TEXT", help="pass over files without this text")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files without the text of `--files-with`."""
    text = config.getoption("--files-with")
    if text and collection_path.suffix == ".py" and text not in collection_path.read_text():
        return True
    return None


def pytest_configure(config: pytest.Config) -> None:
    """Set the process up before any test module is imported; peers that tests start inherit it."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A device chosen by itself must give the same bits on a machine that has a GPU.
    if not _gpu_was_asked_for(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # The developer's own settings and state (~/.swarm) are neither read nor written.
    for name in sorted(os.environ):
        if name.startswith("SWARM_"):
            del os.environ[name]
    config.stash[SCRATCH_HOME] = os.environ["HOME"] = tempfile.mkdtemp(prefix="swarm-test-home-")
    # The same examples every time: a failure seen once is seen again.
    hypothesis.settings.register_profile(
        "repeatable", derandomize=True, deadline=None, database=None
    )
    hypothesis.settings.load_profile("repeatable")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the home that pytest_configure made."""
    shutil.rmtree(config.stash[SCRATCH_HOME], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where none was asked for or none is there."""
    if not _gpu_was_asked_for(config):
        reason = "the GPU is hidden unless asked for with -m gpu"
    elif not torch.cuda.is_available():
        reason = "no CUDA device on this machine"
    else:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
