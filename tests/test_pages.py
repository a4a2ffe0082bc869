"""The pages for operators agree with the code."""

import configparser
import re
from dataclasses import fields
from pathlib import Path

import pytest

from peers.command_line.options import OPTIONS, Options
from swarm import errors
from swarm.config import PeerConfig
from swarm.errors import SwarmError

ROOT = Path(__file__).parents[1]
SERVICE = ROOT / "configs" / "service"
PAGE = (ROOT / "peers" / "what_can_go_wrong.md").read_text(encoding="utf-8")
ITEM = re.compile(
    r"^- `(\w+)`, exit code (\d+): ([^*]*?)\n  \*Remedy:\*(.*?)(?=\n- |\n\n)",
    re.MULTILINE | re.DOTALL,
)
ENVIRONMENT = re.compile(r"\b(SWARM_[A-Z_]+)\b")


def kinds(root: type[SwarmError] = SwarmError) -> dict[str, type[SwarmError]]:
    """Kinds of errors of errors.py alone, because tests and programs may define more."""
    found = {root.__name__: root} if root.__module__ == errors.__name__ else {}
    for child in root.__subclasses__():
        found |= kinds(child)
    return found


def error_offences(page: str) -> list[str]:
    """Differences between the page and errors.py."""
    items = {name: (int(code), cause, remedy) for name, code, cause, remedy in ITEM.findall(page)}
    found = [f"{name} has no item" for name in kinds() if name not in items]
    found += [f"there is no {name}" for name in items if name not in kinds()]
    for name in items.keys() & kinds().keys():
        code, cause, remedy = items[name]
        if code != kinds()[name].exit_code:
            found.append(f"{name} ends with {kinds()[name].exit_code}, not {code}")
        if min(len(cause.strip()), len(remedy.strip())) < len("as above"):
            found.append(f"{name} has no cause, or no remedy")
    return found


@pytest.mark.parametrize(
    "broken",
    [
        ITEM.sub("", PAGE, count=1),
        PAGE.replace("`StateLocked`, exit code 6", "`StateLocked`, exit code 7"),
        PAGE.replace("`StateLocked`", "`StateOpen`"),
        re.sub(r"(- `DoesNotFit`, exit code 12: )[^*]+\n", r"\1\n", PAGE),
        re.sub(r"(- `DoesNotFit`, [^*]+\*Remedy:\*)[^-]+", r"\1\n\n", PAGE),
    ],
)
def test_the_check_finds_a_page_that_is_not_true(broken: str) -> None:
    assert broken != PAGE and error_offences(broken)


def test_every_error_has_its_cause_and_remedy_on_the_page() -> None:
    assert not error_offences(PAGE)


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(SERVICE / "swarm-peer.service")
    return parser["Service"]


def test_the_service_gives_a_peer_time_to_leave() -> None:
    text = (SERVICE / "swarm-peer.service").read_text()
    (leave,) = re.findall(r"SWARM_LEAVE_TIMEOUT=(\d+)", text)
    assert int(leave) == PeerConfig().peer.leave_timeout_s
    assert int(unit()["TimeoutStopSec"]) > int(leave)
    assert unit()["KillMode"] == "mixed", "libp2p's process must outlive the signal"
    page = (ROOT / "peers" / "running_a_swarm.md").read_text()
    for stop in re.findall(r"--stop-timeout (\d+)", page + (SERVICE / "Dockerfile").read_text()):
        assert int(stop) > int(leave)


def test_the_service_does_not_restart_what_a_person_must_mend() -> None:
    final = {int(code) for code in unit()["RestartPreventExitStatus"].split()}
    assert final < {kind.exit_code for kind in kinds().values()}
    assert not final & {1, errors.NobodyReachable.exit_code, errors.NetworkDown.exit_code}
    assert errors.ConfigError.exit_code in final and errors.StateError.exit_code in final


@pytest.mark.parametrize("name", ["swarm-peer.service", "peer.env", "Dockerfile"])
def test_the_service_names_options_that_there_are(name: str) -> None:
    declared = {each.metadata["flag"] for each in fields(Options) if each.metadata}
    twins = {"SWARM_" + flag.split("/")[0][2:].replace("-", "_").upper() for flag in declared}
    named = set(ENVIRONMENT.findall((SERVICE / name).read_text()))
    assert len(OPTIONS) == len(twins) and named and named <= twins


def test_the_image_is_built_from_what_its_context_lets_in() -> None:
    allowed = {
        line[1:]
        for line in (SERVICE / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert all((ROOT / name).exists() for name in allowed)
    copied = re.findall(r"^COPY (\S+)", (SERVICE / "Dockerfile").read_text(), re.MULTILINE)
    assert "scripts/constraints.txt" in copied and "scripts/constraints.txt" in allowed
    assert {"swarm", "peers", "configs", "pyproject.toml", "README.md", "LICENSE"} <= allowed
