"""The environment of every test: one thread, no network hub, a home, and loggers."""

import asyncio
import gc
import inspect
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest
import torch

SCRATCH_HOME = pytest.StashKey[str]()


def _gpu_was_asked_for(config: pytest.Config) -> bool:
    asked = re.findall(r"(not )?\b(?:gpu|gpu2)\b", config.getoption("markexpr"))
    return "" in asked


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options of scripts/test, and options for tests with two GPUs."""
    # Most files need not be loaded to know that no test of theirs is selected.
    parser.addoption("--files-with", metavar="TEXT", help="pass over files without this text")
    parser.addoption(
        "--gpu2-on-cpu", action="store_true", help="run tests marked gpu2 on the CPU, over gloo"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files without the text of `--files-with`."""
    text = config.getoption("--files-with")
    if text and collection_path.suffix == ".py" and text not in collection_path.read_text():
        return True
    return None


def pytest_configure(config: pytest.Config) -> None:
    """Set the process up before any test module is imported. Peers started by tests inherit it."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # The automatic choice of a device must give the same bits on a machine with a GPU.
    if not _gpu_was_asked_for(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # The developer's own settings and state (~/.swarm) are neither read nor written.
    for name in sorted(os.environ):
        if name.startswith("SWARM_"):
            del os.environ[name]
    config.stash[SCRATCH_HOME] = os.environ["HOME"] = tempfile.mkdtemp(prefix="swarm-test-home-")
    # The same examples every time, so that a failure can be repeated.
    hypothesis.settings.register_profile(
        "repeatable", derandomize=True, deadline=None, database=None
    )
    hypothesis.settings.load_profile("repeatable")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the home that pytest_configure made."""
    shutil.rmtree(config.stash[SCRATCH_HOME], ignore_errors=True)


@contextmanager
def loggers_as_before() -> Iterator[None]:
    """Undo the programs' logging set-up at the end, because tests share a process.

    `peers/command_line/command.py` `configure_logging` names the loggers; monitor and doctor set a
    level.
    """
    root, theirs = logging.getLogger(), logging.getLogger("hivemind")
    ours = logging.getLogger("swarm.progress")
    levels = {logger: logger.level for logger in (root, theirs, ours)}
    handlers = {logger: logger.handlers[:] for logger in (root, theirs)}
    propagate = theirs.propagate
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        for logger, before in handlers.items():
            logger.handlers[:] = before
        theirs.propagate = propagate


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    with loggers_as_before():
        yield


@pytest.fixture
def uncollected() -> Iterator[None]:
    """The garbage collector is off: ended objects must free their memory without it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test, in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests for GPUs if they were not requested or too few GPUs are there."""
    reasons = {"gpu": _lacking(config, 1), "gpu2": _lacking(config, 2)}
    if config.getoption("--gpu2-on-cpu"):
        del reasons["gpu2"]
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _lacking(config: pytest.Config, needed: int) -> str | None:
    """Why tests with this number of GPUs are skipped."""
    if not _gpu_was_asked_for(config):
        return "GPUs are hidden unless asked for with -m gpu or -m gpu2"
    if torch.cuda.device_count() < needed:
        return f"{torch.cuda.device_count()} of {needed} CUDA devices on this machine"
    return None
