"""The lines of `events.jsonl`: one schema, written, read and documented alike."""

import json

import pytest

from swarm.protocol.records.life_events import EventReader, Finished, abridged


def test_a_line_is_read_by_the_schema_of_its_kind() -> None:
    line = json.dumps({"event": "finished", "time": 12.5, "round": 3, "digest": "ab"})
    assert EventReader().parse(line) == ("finished", 12.5, Finished(3, "ab"))


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{}",
        '{"event": "finished", "time": 1.0, "round": 3}',
        '{"event": "finished", "time": 1.0, "round": "3", "digest": "ab"}',
        '{"event": "finished", "time": 1.0, "round": 3, "digest": "ab", "more": 1}',
        '{"event": "finished", "time": "now", "round": 3, "digest": "ab"}',
        '{"event": "started over", "time": 1.0}',
        '{"event": "fini',
    ],
)
def test_what_is_no_event_of_this_version_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        EventReader().parse(line)


def applied(number: int, members: list[str]) -> dict[str, object]:
    return {"round": number, "members": members, "owners": {"0": members[:1]}}


def test_a_line_repeats_members_and_owners_only_when_they_change() -> None:
    rounds = [applied(1, ["a"]), applied(2, ["a"]), applied(3, ["a", "b"])]
    lines = [
        abridged(fields, before) for before, fields in zip([{}, *rounds], rounds, strict=False)
    ]
    assert lines == [rounds[0], {"round": 2}, {"round": 3, "members": ["a", "b"]}]
    reader = EventReader()
    read = [reader.read(json.dumps({"event": "applied", "time": 1.0, **line})) for line in lines]
    assert [{name: event[name] for name in rounds[0]} for event in read] == rounds
