"""Manifests: ancestry by codes alone, and a run's fields about its text."""

import json
from base64 import b64decode, b64encode
from dataclasses import replace

import pytest

from swarm.errors import BadManifest
from swarm.protocol.values.manifest import Code, Founding, Member, decode_manifest, is_ancestor
from swarm.protocol.values.texts import Text, TokenizerFile
from tests.protocol.round_pump import found, make_rules

REFORM = (3, (2, "62"))
LATER = (5, (1, "7a"))


def at(height: int, *lineage: tuple[int, tuple[int, str]]) -> Code:
    return (*lineage, (height, ()))


@pytest.mark.parametrize(
    ("code", "of", "is_one"),
    [
        (at(2), at(2), True),
        (at(2), at(7), True),
        (at(7), at(2), False),
        (at(3), at(3, REFORM), True),  # a reform repeats the height of its parent
        (at(4), at(9, REFORM), False),  # decided by the peers that the reform removed
        (at(3, REFORM), at(9), False),
        (at(4, REFORM), at(5, REFORM), True),
        (at(5, REFORM), at(8, REFORM, LATER), True),
        (at(6, REFORM), at(8, REFORM, LATER), False),
        (at(3), at(8, REFORM, LATER), True),
        (at(4, (3, (3, "99"))), at(5, REFORM), False),
    ],
)
def test_ancestry(code: Code, of: Code, is_one: bool) -> None:
    assert is_ancestor(code, of) is is_one


TEXT = Text("books", "byte-0", "ab" * 32, documents=7, tokens=1000, windows=31)
FOUNDING = Founding("a", "n", "cd" * 32, 10, "ef" * 32, 10, TEXT)
FOUNDED = found(make_rules(), ["a"], founding=FOUNDING)


def test_a_manifest_names_the_tokenizer_only_of_a_run_that_has_a_file() -> None:
    assert b'"tokenizer":null' not in FOUNDED.encoded
    file = TokenizerFile("ab" * 32, 10, 0, 5)
    founding = replace(FOUNDING, tokenizer=file)
    named = replace(FOUNDED, founding=founding)
    assert decode_manifest(named.encoded).founding.tokenizer == file
    assert named.founding.blobs == FOUNDING.blobs | {file.digest: 10}
    null = FOUNDED.encoded.replace(b'"text":{', b'"tokenizer":null,"text":{')
    with pytest.raises(BadManifest):
        decode_manifest(null)
    for wrong in ({"digest": "x"}, {"end_of_text": -1}, {"num_bytes": 0}):
        bad = replace(founding, tokenizer=replace(file, **wrong))
        with pytest.raises(BadManifest):
            decode_manifest(replace(named, founding=bad).encoded)


def test_a_manifest_says_which_text_its_run_trains_on() -> None:
    assert decode_manifest(FOUNDED.encoded).founding.text == TEXT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "x" * 65),
        ("name", "red \x1b[31m"),
        ("name", "two\nlines"),
        ("tokenizer", "Byte 0"),
        ("tokenizer", "b" * 65),
        ("digest", "ab"),
        ("digest", "XY" * 32),
        ("documents", 0),
        ("tokens", 2**48 + 1),
        ("tokens", -1),
        ("windows", 0),
        ("windows", "31"),
        ("windows", 31.5),
        ("more", 1),
    ],
)
def test_a_text_beyond_its_limits_is_refused(field: str, value: object) -> None:
    content = json.loads(FOUNDED.encoded)
    content["founding"]["text"][field] = value
    encoded = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(BadManifest, match=rf"founding\.text\.{field}"):
        decode_manifest(encoded)


DIGESTS = [f"{number:064x}" for number in range(4)]
BY_ALL = (("a", DIGESTS[0]), ("b", DIGESTS[1]))
SOURCED = replace(
    FOUNDED,
    members={"a": Member(0, 1.0), "b": Member(0, 1.0)},
    contributors=("a", "b"),
    sources={"expert.0": (("b", DIGESTS[2]),), "shared.0": BY_ALL, "shared.1": ()},
)


def test_units_to_which_all_contribute_name_nobody_and_no_fact_is_lost() -> None:
    packed = json.loads(SOURCED.encoded)["sources"]
    assert b64decode(packed["shared.0"]) == bytes.fromhex(DIGESTS[0] + DIGESTS[1])
    assert packed["expert.0"] == [["b", DIGESTS[2]]]
    assert decode_manifest(SOURCED.encoded) == SOURCED


@pytest.mark.parametrize(
    "packed",
    [
        "",
        "AAAA",
        "not base64!",
        b64encode(bytes(32)).decode(),
        b64encode(bytes(96)).decode(),
        b64encode(bytes(64)).decode().rstrip("="),
        b64encode(bytes(64)).decode()[:-3] + "B==",
        [["a", DIGESTS[0]], ["b", DIGESTS[1]]],
        7,
        None,
        [["a", 7]],
    ],
)
def test_sources_have_one_form(packed: object) -> None:
    content = json.loads(SOURCED.encoded)
    content["sources"]["shared.0"] = packed
    with pytest.raises(BadManifest):
        decode_manifest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def test_what_is_no_digest_is_never_packed() -> None:
    """It is decoded unchanged, so that the check of names can refuse it."""
    for strange in ("A" * 64, "x" * 64, " " * 64, "0" * 63):
        manifest = replace(SOURCED, sources={"shared.0": (("a", DIGESTS[0]), ("b", strange))})
        assert decode_manifest(manifest.encoded) == manifest
