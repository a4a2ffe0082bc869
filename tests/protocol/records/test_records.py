"""Records survive writing and reading, and hostile bytes give one kind of error."""

import contextlib
import dataclasses
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import BadRecord
from swarm.protocol.records import records
from swarm.protocol.records.records import (
    MAX_MANIFESTS,
    MAX_RECORD_BYTES,
    MAX_ROUNDS,
    DhtRecord,
    LinkFigures,
    Losses,
    MergeRecord,
    PeerRecord,
    RoundFigures,
    RoutingFigures,
    RunRecord,
    RunState,
    Score,
    ScoreRecord,
    Silence,
    ValidationRecord,
    WorkersFigures,
    decode_record,
    encode_record,
    told_losses,
)
from swarm.protocol.values.manifest import Manifest, PeerId
from swarm.protocol.values.texts import Text
from tests.peer_records import peer_record
from tests.protocol.round_pump import found, make_rules

HEX = "0123456789abcdef" * 4
LONGEST = 2.2250738585072014e-308
"""No float takes more characters."""

RUN = RunRecord(
    run="demo-0123456789abcdef",
    name="demo",
    fingerprint=HEX,
    founder="QmFounder",
    founding=HEX,
    founding_bytes=1234,
    config=HEX,
    config_bytes=987,
    state=RunState.GATHERING,
    wait_for_peers=4,
    text=Text("books", "byte-0", HEX, documents=7, tokens=1000, windows=31),
)
PEER = peer_record(
    "QmPeer",
    name="Zoë's laptop",
    addresses=("/ip4/10.0.0.1/tcp/4001/p2p/QmPeer",),
    loss=2.5,
    val_loss=None,
    refused={"non_finite": 1},
    routing=RoutingFigures(1.5, 0, 0.0, None, (250, 750)),
    last_round=RoundFigures(5, True, 12.5, {"training": 9.25}, 10, 20),
    link=LinkFigures(12.5, None, 40.0, {"QmFriend": Silence.GONE}),
    workers=WorkersFigures(2, 1.5, {"sums": 0.25}, None, None, (1,), 0, "worker 0 is slow"),
    grad_norm=0.5,
    grad_spikes=1,
)
MERGE = MergeRecord(
    generation="0", round=4, merged=1, step=200, alpha=0.08, donors={3: ((1, 2), (0, 7))}
)
VALIDATION = ValidationRecord(
    round=3,
    manifest_digest=HEX,
    val_loss=2.4,
    tokens=65536,
    text_bytes=90000,
    recent=((1, 4.0), (2, 3.0)),
)
SCORES = ScoreRecord((Score(HEX, 3, "arc_easy", "acc,none", 0.25, 2376),))
SCORE = dataclasses.asdict(SCORES.scores[0])
EXAMPLES: list[DhtRecord] = [RUN, PEER, MERGE, VALIDATION, SCORES]
KINDS = [type(example) for example in EXAMPLES]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_a_record_is_read_back_as_it_was_written(record: DhtRecord) -> None:
    encoded = encode_record(record)
    assert decode_record(type(record), encoded) == record
    assert encode_record(decode_record(type(record), memoryview(encoded))) == encoded


@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_random_bytes_are_a_bad_record(kind: type, noise: bytes) -> None:
    with pytest.raises(BadRecord):
        decode_record(kind, noise)


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_hostile_value_in_any_field_is_a_bad_record_or_a_sound_one(
    record: DhtRecord, data: st.DataObject
) -> None:
    values = json.loads(encode_record(record))
    field = data.draw(st.sampled_from(sorted(values)))
    values[field] = data.draw(json_values)
    try:
        decoded = decode_record(type(record), json.dumps(values).encode())
    except BadRecord as refused:
        assert refused.reason in ("record_size", "record_schema")
        assert len(str(refused)) <= records.MAX_REASON
    else:
        # Admitted values can be shown and published again.
        assert decode_record(type(record), encode_record(decoded)) == decoded


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_truncated_or_changed_record_never_raises_anything_else(
    record: DhtRecord, data: st.DataObject
) -> None:
    encoded = bytearray(encode_record(record))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] = data.draw(st.integers(0, 255))
    with pytest.raises(BadRecord):
        decode_record(type(record), bytes(encoded[:position]))
    with contextlib.suppress(BadRecord):
        decode_record(type(record), bytes(encoded))


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        (PEER, "extra", 1),
        (PEER, "round", -1),
        (PEER, "round", 2**31),
        (PEER, "height", 2**60),
        (PEER, "round", "3"),
        (PEER, "round", 3.0),
        (PEER, "loss", "NaN"),
        (PEER, "capacity", 0),
        (PEER, "manifest_digest", "xyz"),
        (PEER, "name", "\x1b[31mred"),
        (PEER, "reason", "x" * 301),
        (PEER, "reason", "two\nlines"),
        (PEER, "addresses", ["/ip4/1.2.3.4/tcp/1"] * 17),
        (PEER, "owned_experts", [70_000]),
        (PEER, "state", "idle"),
        (MERGE, "alpha", 1.5),
        (MERGE, "round", 2**31),
        (VALIDATION, "round", 2**60),
        (MERGE, "donors", {"x": [[1]]}),
        (RUN, "run", ""),
        (VALIDATION, "recent", [[1, 2.0]] * 201),
        (PEER, "loss", 1.7e308),
        (PEER, "tokens_per_s", 1.7e308),
        (PEER, "capacity", 1.7e308),
        (PEER, "grad_norm", records.MAX_REAL * 1.01),
        (VALIDATION, "val_loss", -1.7e308),
        (VALIDATION, "recent", [[1, 1.7e308]]),
        (SCORES, "scores", []),
        (SCORES, "scores", [SCORE] * 25),
        (SCORES, "scores", [SCORE | {"task": "two words"}]),
        (SCORES, "scores", [SCORE | {"metric": "x" * 65}]),
        (SCORES, "scores", [SCORE | {"samples": 0}]),
        (SCORES, "scores", [SCORE | {"round": 2**31}]),
    ],
)
def test_values_outside_the_schema_are_refused(
    record: DhtRecord, field: str, value: object
) -> None:
    values = json.loads(encode_record(record)) | {field: value}
    with pytest.raises(BadRecord, match=field, check=lambda error: error.reason == "record_schema"):
        decode_record(type(record), json.dumps(values).encode())


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_loss_that_is_no_finite_number_is_refused(constant: str) -> None:
    encoded = encode_record(PEER).replace(b'"loss":2.5', f'"loss":{constant}'.encode())
    with pytest.raises(BadRecord, match="loss"):
        decode_record(PeerRecord, encoded)


@pytest.mark.parametrize("value", [0.0, 3.4e38, records.MAX_REAL])
def test_whatever_a_peer_may_compute_is_admitted(value: float) -> None:
    """A diverged run has losses and norms as large as 32 bits allow."""
    record = dataclasses.replace(PEER, loss=-value, grad_norm=value, tokens_per_s=value)
    assert decode_record(PeerRecord, encode_record(record)) == record


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(PeerRecord)])
def test_a_missing_field_is_refused(field: str) -> None:
    values = json.loads(encode_record(PEER))
    del values[field]
    with pytest.raises(BadRecord, match=field):
        decode_record(PeerRecord, json.dumps(values).encode())


def test_an_oversized_record_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(BadRecord, match="too large") as refused:
        decode_record(PeerRecord, b"[" * (MAX_RECORD_BYTES + 1))
    assert refused.value.reason == "record_size"
    with pytest.raises(BadRecord):  # deep nesting within the limit
        decode_record(PeerRecord, b"[" * MAX_RECORD_BYTES)


def test_the_largest_admissible_peer_record_fits() -> None:
    largest = dataclasses.replace(
        PEER,
        peer_id="Q" * 52,
        name="😀" * 64,
        addresses=("a" * 256,) * 16,
        generation="f" * 32,
        owned_experts=tuple(range(64_000, 65_024)),
        refused={f"{'r' * 60}{k:04}": 2**62 for k in range(records.MAX_REFUSED)},
        reason='"' * records.MAX_REASON,
        version="v" * 64,
        routing=RoutingFigures(
            LONGEST, 2**62, 1.0, 0.5, (1000,) * 256,
            ((65_535, 65_534, -1000),) * records.MAX_PAIRS,
        ),
        grad_norm=LONGEST,
        grad_spikes=2**62,
        last_round=RoundFigures(
            2**31 - 1, False, LONGEST,
            {f"{'p' * 62}{k:02}": LONGEST for k in range(8)},
            2**62, 2**62, '"' * records.MAX_BRIEF,
            {"Q" * 51 + "1234"[k]: '"' * records.MAX_BRIEF for k in range(records.MAX_LEFT_OUT)},
        ),
        tokens_lost=2**62,
        engine="e" * records.MAX_BRIEF,
        trouble='"' * records.MAX_BRIEF,
        link=LinkFigures(
            LONGEST, LONGEST, LONGEST,
            {"Q" * 51 + "12345678"[k]: Silence.SILENT for k in range(records.MAX_UNREACHED)},
        ),
        workers=WorkersFigures(
            2**16, LONGEST,
            {f"{'k' * 22}{k:02}": LONGEST for k in range(records.MAX_KINDS)},
            LONGEST, LONGEST, (2**16 - 1,) * records.MAX_IDLE, 0,
            '"' * records.MAX_BRIEF,
        ),
        possession="A" * 86 + "==",
    )  # fmt: skip
    encoded = encode_record(largest)
    assert len(encoded) <= MAX_RECORD_BYTES
    assert decode_record(PeerRecord, encoded) == largest


def test_the_largest_admissible_run_validation_and_score_records_fit_their_own_limits() -> None:
    run = RunRecord(
        run="n" * 64 + "-" + "0" * 16, name="n" * 64, fingerprint=HEX,
        founder="Q" * 52, founding=HEX,
        founding_bytes=2**63 - 1, config=HEX, config_bytes=2**63 - 1, state=RunState.GATHERING,
        wait_for_peers=2**63 - 1,
        text=Text("😀" * 64, "b" * 64, HEX, *[2**48] * 3),
    )  # fmt: skip
    losses = tuple((2**31 - 1 - k, -LONGEST) for k in range(200))
    validation = ValidationRecord(2**31 - 1, HEX, -LONGEST, 2**63 - 1, 2**63 - 1, losses)
    score = Score(HEX, 2**31 - 1, "t" * 64, "m" * 64, -LONGEST, 2**63 - 1)
    scores = ScoreRecord((score,) * records.MAX_SCORES)
    for record in (run, validation, scores):
        assert decode_record(type(record), encode_record(record)) == record
    for kind, limit in (
        (RunRecord, records.MAX_RUN_RECORD_BYTES),
        (ValidationRecord, records.MAX_VALIDATION_BYTES),
        (ScoreRecord, records.MAX_SCORE_BYTES),
    ):
        with pytest.raises(BadRecord, match="too large"):
            decode_record(kind, b"[" * (limit + 1))


def test_an_inadmissibly_large_record_is_our_own_bug() -> None:
    donors = dict.fromkeys(range(64), ((1, 2, 3, 4),) * 64)
    large = dataclasses.replace(MERGE, donors=donors)
    with pytest.raises(AssertionError):
        encode_record(large)
    small = records.fitted(large)
    assert len(encode_record(small)) <= MAX_RECORD_BYTES
    assert small.donors == {expert: donors[expert] for expert in range(len(small.donors))}
    assert small.donors
    assert records.fitted(MERGE) == MERGE


@given(st.text())
def test_any_reason_can_be_shortened_into_a_record(text: str) -> None:
    record = dataclasses.replace(PEER, reason=records.shortened(text))
    assert decode_record(PeerRecord, encode_record(record)) == record


def test_a_short_reason_stays_as_it_is() -> None:
    assert records.shortened("expert 7: B left, adopted by D") == "expert 7: B left, adopted by D"
    assert records.shortened("two\n  lines\x1b[0m") == "two lines [0m"


def test_peers_are_spread_over_all_shards() -> None:
    counts = [0] * records.NUM_SHARDS
    for number in range(1600):
        counts[records.shard_of(f"QmPeer{number}")] += 1
    # Binomial with mean 100 and deviation 9.7: six deviations either way.
    assert min(counts) > 40 and max(counts) < 160
    few = {records.runs_key(f"QmPeer{number}") for number in range(100)}
    assert few == set(records.runs_keys())


def test_keys_of_different_runs_and_facts_differ() -> None:
    keys = records.runs_keys()
    for run in ("a", "b"):
        keys += [records.peers_key(run, shard) for shard in range(records.NUM_SHARDS)]
        keys += records.merges_keys(run) + records.validation_keys(run) + records.scores_keys(run)
    assert len(set(keys)) == len(keys)


OTHER = "cd" * 32
ROUNDS = 12
LAST = 2**31 - 1


def tip_of(*peers: PeerId, trainee: PeerId = "") -> Manifest:
    tip = replace(found(make_rules(), list(peers)), run="run-1", height=ROUNDS, round=ROUNDS)
    members = {p: replace(m, votes=p != trainee) for p, m in tip.members.items()}
    return replace(tip, members=members)


def loss_of(number: int) -> float:
    return 5.0 - number / 10


def measured(tip: Manifest) -> dict[PeerId, ValidationRecord]:
    """Each round by one voter, as in an honest run; the tip by its first convener."""
    found, order = {}, tip.order
    for place, peer in enumerate(order):
        rounds = [n for n in range(1, ROUNDS) if n % len(order) == place]
        recent = tuple((number, loss_of(number)) for number in rounds)
        found[peer] = ValidationRecord(*said(recent[-1], OTHER), recent[:-1])
    newest = found[order[0]]
    recent = (*newest.recent, (newest.round, newest.val_loss))
    found[order[0]] = ValidationRecord(*said((ROUNDS, loss_of(ROUNDS)), tip.digest), recent)
    return found


def said(of_round: tuple[int, float], digest: str) -> tuple[int, str, float, int, int]:
    number, loss = of_round
    return number, digest, loss, 100, 200


CURVE = {number: loss_of(number) for number in range(1, ROUNDS + 1)}


def test_each_round_is_measured_by_one_member_and_the_curve_is_made_of_all() -> None:
    tip = tip_of(*"ABCD")
    told = told_losses(measured(tip), tip)
    assert told.by_round == CURVE
    assert told.by_manifest == {tip.digest: loss_of(ROUNDS)}
    assert told.bits_per_byte_of_nat == measured(tip)[tip.order[0]].bits_per_byte_of_nat
    assert told_losses({}, tip) == Losses()


def test_one_record_of_the_last_round_there_is_makes_no_curve() -> None:
    tip = tip_of(*"ABCD")
    honest, liar = measured(tip), tip.order[-1]
    every = tuple((number, 0.001) for number in range(ROUNDS + 1))
    for number in (LAST, ROUNDS + 1, ROUNDS, ROUNDS - 1):
        lie = ValidationRecord(number, tip.digest, 0.001, 1, 10**6, every)
        told = told_losses(honest | {liar: lie}, tip)
        by_others = {n for peer in honest.keys() - {liar} for n, _ in rows(honest[peer])}
        own = set(range(ROUNDS)) - by_others
        assert told.by_round == CURVE | dict.fromkeys(own, 0.001), "nobody else measured these"
        assert told.by_manifest == {tip.digest: loss_of(ROUNDS)}
        assert told.bits_per_byte_of_nat == honest[tip.order[0]].bits_per_byte_of_nat


def rows(record: ValidationRecord) -> tuple[tuple[int, float], ...]:
    return (*record.recent, (record.round, record.val_loss))


def test_of_two_that_contradict_each_other_alone_the_higher_counts() -> None:
    tip = tip_of(*"ABCD")
    honest, liar = measured(tip), tip.order[-1]
    target = honest[tip.order[1]]
    for claim in (0.001, 9.0):
        lies = tuple((number, claim) for number, _ in rows(target))
        told = told_losses(honest | {liar: replace(honest[liar], recent=lies)}, tip)
        changed = {n for n, loss in told.by_round.items() if loss != CURVE[n]}
        wanted = {n for n, _ in rows(target)} if claim > 5 else set()
        assert changed == wanted


def test_the_median_counts_where_three_have_measured() -> None:
    tip = tip_of(*"ABC")
    losses = {"A": 3.0, "B": 3.01, "C": 0.1}
    records = {peer: ValidationRecord(5, OTHER, loss, 1, 2) for peer, loss in losses.items()}
    assert told_losses(records, tip).by_round == {5: 3.01}


def test_of_trainees_and_strangers_nothing_counts() -> None:
    tip = tip_of(*"ABCD", trainee="D")
    every = tuple((number, 0.001) for number in range(ROUNDS))
    lie = ValidationRecord(ROUNDS - 1, tip.digest, 0.001, 1, 200, every)
    told = told_losses(measured(tip) | {"D": lie, "X": lie}, tip)
    assert told.by_round == CURVE and told.by_manifest == {tip.digest: loss_of(ROUNDS)}


def test_without_a_manifest_everybody_is_heard() -> None:
    lie = ValidationRecord(LAST, OTHER, 0.001, 1, 200, ((1, 0.0),))
    assert told_losses({"X": lie}, None).by_round == {1: 0.0, LAST: 0.001}


def test_losses_of_a_long_run_are_thinned_and_the_newest_are_all_there() -> None:
    told, last = Losses(), 10 * MAX_ROUNDS
    for first in range(0, last, 64):
        some = {number: float(number) for number in range(first, first + 64)}
        told = told.with_newer(Losses(some, {f"manifest{first}": 1.0}))
    assert MAX_ROUNDS // 2 <= len(told.by_round) <= MAX_ROUNDS
    assert len(told.by_manifest) == MAX_MANIFESTS
    newest = set(range(last - MAX_ROUNDS // 4, last))
    assert newest <= told.by_round.keys() and 0 in told.by_round
