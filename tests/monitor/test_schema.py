"""The one schema is typed, complete and documented. No field of a record is missing."""

import dataclasses
import functools
import json
import operator
import re
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import pytest
from pydantic import ConfigDict, create_model

from swarm.monitor import schema
from swarm.monitor.schema import PeerJson, SnapshotJson, as_json
from swarm.monitor.snapshot import Snapshot
from swarm.protocol.records.records import PeerRecord, RoutingFigures
from tests.monitor.small_swarm import manifest, project, remembered, sighting, snapshot_with

PAGE = Path(schema.__file__).with_name("README.md")
OBJECTS = {
    name: kind
    for name, kind in vars(schema).items()
    if name.endswith("Json") and isinstance(kind, type)
}


def checker(kind: Any) -> Any:
    """The same type with models instead of typed dictionaries, which Python 3.11 cannot check."""
    if is_typeddict(kind):
        fields: Any = {name: (checker(hint), ...) for name, hint in get_type_hints(kind).items()}
        forbid = ConfigDict(extra="forbid", strict=True)
        return create_model(kind.__name__, __config__=forbid, **fields)
    inner = [checker(each) for each in get_args(kind) if get_origin(kind) in (list, UnionType)]
    if not inner:
        return kind
    if get_origin(kind) is list:
        return list[inner[0]]  # type: ignore[valid-type]
    return functools.reduce(operator.or_, inner)


CHECK = checker(SnapshotJson)


def shown(snapshot: Snapshot, unreachable: str | None = None) -> dict[str, Any]:
    text = json.dumps(as_json(remembered(snapshot), unreachable), allow_nan=False)
    CHECK.model_validate_json(text)
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize("has_manifest", [False, True])
def test_what_is_said_has_the_types_that_are_promised(has_manifest: bool) -> None:
    routing = RoutingFigures(1.5, 0, 0.0, None)
    seen = sighting(tip=manifest() if has_manifest else None, at=100.0)
    peers = {p: dataclasses.replace(r, routing=routing) for p, r in seen.peers.items()}
    found = shown(project(dataclasses.replace(seen, peers=peers, published={"QmA": 99.5})))
    assert list(found) == list(get_type_hints(SnapshotJson))
    assert [peer["published"] for peer in found["peers"]] == [99.5, None, None]
    assert found["members"] == (3 if has_manifest else None)


def test_nothing_of_a_peers_record_is_left_out() -> None:
    promised = set(get_type_hints(PeerJson))
    assert {field.name for field in dataclasses.fields(PeerRecord)} < promised
    snapshot = snapshot_with()
    for row, peer in zip(snapshot.peers, shown(snapshot)["peers"], strict=True):
        assert set(peer) == promised
        record = json.loads(json.dumps(dataclasses.asdict(row.record), default=lambda v: v.value))
        assert {key: peer[key] for key in record} == record


def test_every_field_is_described() -> None:
    """The page has a table for each object.

    Repeated fields of a record are in the record's file.
    """
    page = PAGE.read_text()
    of_records = {field.name for field in dataclasses.fields(PeerRecord)}
    for name, kind in OBJECTS.items():
        start = page.index(f"**{name.removesuffix('Json')}**")
        table = page[start:].partition("\n**")[0]
        described = set(re.findall(r"`([a-z_]+)`", table))
        told = set(get_type_hints(kind)) - (of_records if kind is PeerJson else set())
        assert told <= described, (name, told - described)


def test_an_expert_tells_its_age_and_who_is_most_like_it() -> None:
    found = shown(snapshot_with(tip=manifest()))["experts"]
    assert found[0] == {
        "expert": 0, "owners": ["QmA"], "version": 4, "age": 2, "nearest": 1,
        "donors": [[1, 2], [2, 1]],
    }  # fmt: skip
    without = shown(snapshot_with())["experts"]
    assert without[-1]["version"] is without[-1]["age"] is without[-1]["nearest"] is None


def test_a_look_that_failed_is_told_with_what_was_known_before() -> None:
    snapshot = snapshot_with()
    lost, before = shown(snapshot, "records: no answer within 4 s"), shown(snapshot)
    health = {"word": "unreachable", "reason": "records: no answer within 4 s"}
    assert lost == before | {"health": health}
