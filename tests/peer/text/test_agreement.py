"""A joiner's options against the existing run."""

import pytest

from swarm.config.parse import parse_override
from swarm.errors import RunMismatch
from swarm.peer.text.run_request import require_settings
from tests.train.runs import tiny_run


def asked(*settings: str) -> dict[str, object]:
    parsed = map(parse_override, settings)
    return {f"{section}.{field}": value for section, field, value in parsed}


def test_a_list_that_was_asked_for_equals_that_of_the_run() -> None:
    run = tiny_run()
    betas = ",".join(map(str, run.optimizer.betas))
    require_settings(run, asked(f"optimizer.betas=[{betas}]", f"run.peers={run.run.peers}"))
    with pytest.raises(RunMismatch, match=r"optimizer.betas: asked \[0.5, 0.6\], the run has \["):
        require_settings(run, asked("optimizer.betas=[0.5,0.6]"))
