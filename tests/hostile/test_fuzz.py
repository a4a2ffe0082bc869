"""Every decoder of foreign bytes raises only the project's errors for spoilt ones.

Decoded values go through a peer's checks of unverified data. Messages go to a round machine, which
must not raise on them at all. The files of `corpus/` are inputs that once did harm. Each is named
DECODER-WHAT and is replayed first. The exhaustive run tries a million inputs in all.
"""

from __future__ import annotations

import random
import time
from functools import cache
from pathlib import Path

import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, get_dht_time
from hypothesis import HealthCheck, Phase, given, settings

from swarm.codecs import check_finite
from swarm.codings import coded_bytes
from swarm.config import PeerConfig, RunConfig, parse_config
from swarm.data.tokenizer_file import FileTokenizer, train_tokenizer
from swarm.deltas.unit_deltas import apply_delta, check_delta
from swarm.errors import ConfigError, HostileInput, InvitationError, RunMismatch, TokenizerError
from swarm.network.dht.bounded_msgpack import BoundedSerializer, is_bytes, structure_problem
from swarm.network.dht.signed_records import SignedRecords, owner_of
from swarm.network.fetch.bulk import ASK_BYTES, HEAD_BYTES, Ask, Head
from swarm.network.rounds.inbound import verified
from swarm.network.runs.run_records import check_announcement, check_state, decode_config
from swarm.network.runs.run_search import check_run_id, decode_preparing, encode_preparing
from swarm.network.wire.daemon import Address
from swarm.network.wire.identity import Identity, load_or_create_identity, verify
from swarm.network.wire.relay import _addressed
from swarm.network.wire.relayed_messages import (
    EnvelopeKind,
    RelayedMessages,
    open_sealed,
    seal,
    split,
)
from swarm.protocol.chain import chain_record
from swarm.protocol.chain.gaps import between, decode_page, encode_page, filled, gaps
from swarm.protocol.chain.gaps import decode_question as decode_heads_question
from swarm.protocol.chain.gaps import encode_question as encode_heads_question
from swarm.protocol.chain.trust import Chain
from swarm.protocol.exchange.handover import (
    Moments,
    decode_answer,
    decode_question,
    encode_answer,
    encode_question,
)
from swarm.protocol.messages.events import Received, Record, Tick
from swarm.protocol.messages.message_bytes import (
    BareMessage,
    decode,
    decode_evidence,
    decode_offer,
    encode,
    encode_evidence,
    foreign_manifest,
)
from swarm.protocol.messages.messages import Ballot, Header, Propose
from swarm.protocol.records.printable import printable
from swarm.protocol.records.records import (
    MergeRecord,
    PeerRecord,
    RunRecord,
    ScoreRecord,
    ValidationRecord,
    decode_record,
    encode_record,
)
from swarm.protocol.rounds import LocalPeer, RoundMachine
from swarm.protocol.rounds.policies.checks import proposal_problem, successor_problem
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.invitation import PrivateInvitation, as_text, from_text
from swarm.protocol.values.layout import layout_of
from swarm.train.workers.controller_wire import MAX_STRANGER_BYTES, first_message
from swarm.train.workers.controller_wire import encoded as encoded_message
from swarm.train.workers.roster import Node, node_of
from tests.deltas.units import CODINGS, base_of, delta_of, gaussian, reading, unit
from tests.deltas.units import encoded as encoded_delta
from tests.hostile.fuzzing import Decoder, spoilt
from tests.protocol.chain.test_gaps import long_chain, without
from tests.protocol.messages.test_message_bytes import RULES as SHOWN_RULES
from tests.protocol.messages.test_message_bytes import TRUE as SHOWN
from tests.protocol.messages.test_wire import (
    EVIDENCE,
    HEADER,
    INVITATION,
    MESSAGES,
    NEXT,
    OFFER,
    RULES,
    TIP,
)
from tests.protocol.records.test_records import MERGE, PEER, RUN, SCORES, VALIDATION
from tests.scenarios.swarms import EXACT

CORPUS = Path(__file__).parent / "corpus"
EXHAUSTIVE = 1_000_000
CONFIG = parse_config(RunConfig, EXACT, source="file")
LONGEST_S = 60.0
BLOBS = {
    digest: blob for message in MESSAGES for digest, blob in encode(HEADER, message)[1].items()
}


DELTA_UNITS = tuple(unit(coding, "bf16", 700) for coding in CODINGS)
DELTAS = tuple(encoded_delta(layout, gaussian(700, scale=1e-2)) for layout in DELTA_UNITS)


@cache
def identity() -> Identity:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return load_or_create_identity(Path(folder) / "key")


def judge_delta(encoded: bytes) -> None:
    """Checks a delta in each coding. An accepted delta must give an accepted value."""
    for layout in DELTA_UNITS:
        if coded_bytes(layout) == len(encoded):
            delta, base = delta_of(encoded), base_of(layout, gaussian(layout.num_elements))
            check_delta(layout, delta, reading(base), absolute=1.0, relative=1.0)
            check_finite(layout, apply_delta(layout, reading(base), delta))


def judge_manifest(encoded: bytes) -> None:
    manifest = foreign_manifest(encoded)
    assert manifest.code and len(manifest.order) == len(manifest.members)
    manifest.is_quorum(manifest.members)
    for parent in (TIP, NEXT):
        successor_problem(manifest, parent, RULES, due=False)
    check_state(manifest, layout_of(CONFIG))


def judge_evidence(encoded: bytes) -> None:
    """Checks it for the manifest of the sound evidence, and the part with valid signatures."""
    evidence = decode_evidence(encoded)
    proposed = Propose(Ballot(0, "A"), SHOWN.manifest(), (), evidence)
    left = verified(Header(((2, ()),), SHOWN.tip.digest, "0"), proposed, "A", "run-1")
    assert isinstance(left, Propose) and left.evidence
    for each in (evidence, left.evidence):
        proposal_problem(SHOWN.manifest(), each, SHOWN.tip, SHOWN_RULES, due=False)


def judge_shown_manifest(encoded: bytes) -> None:
    """A spoilt manifest for which sound evidence is shown."""
    manifest = foreign_manifest(encoded)
    if proposal_problem(manifest, SHOWN.evidence(), SHOWN.tip, SHOWN_RULES, due=False) is None:
        assert manifest == SHOWN.manifest()


def started() -> RoundMachine:
    """A member of the run that has only the tip."""
    peer = LocalPeer("A", 1.0, RULES, Timers(), now=0.0, random=random.Random(1))
    machine = RoundMachine(peer, Record(TIP, None, None), stored=[])
    machine.start(0.0)
    return machine


def hear_message(encoded: bytes) -> None:
    """Decodes a message and its attachments, and hands them to a member of the run."""
    bare = BareMessage(encoded)
    bare.attachments_within(BLOBS)
    bare.holders(BLOBS)
    header, message = decode(encoded, BLOBS)
    machine = started()
    for now in (1.0, 10.0):
        machine.handle(Received("B", header, message), now)
        machine.handle(Tick(), now)


def hear_content(encoded: bytes) -> None:
    """Attachments of a message (manifest, offer, evidence): sound digests, spoilt content."""
    for message in MESSAGES[2], MESSAGES[-2]:
        payload, blobs = encode(HEADER, message)
        for digest, blob in blobs.items():
            name = f'"{digest}","num_bytes":{len(blob)}'.encode()
            new = f'"{digest_of(encoded)}","num_bytes":{len(encoded)}'.encode()
            if name in payload:
                changed = payload.replace(name, new)
                try:
                    header, heard = decode(changed, {**blobs, digest_of(encoded): encoded})
                except HostileInput:
                    continue
                machine = started()
                machine.handle(Tick(), 10.0)
                machine.handle(Received("B", header, heard), 11.0)
                machine.handle(Tick(), 12.0)


def ask_for_heads(encoded: bytes) -> None:
    """Asks a peer that has them."""
    decode_page(encode_page(between(HEADS, decode_heads_question(encoded))))


def show_heads(encoded: bytes) -> None:
    """Shows heads to a peer that lacks them. It accepts only heads of the real chain."""
    page = decode_page(encoded)
    gap = GAP.extended(page, lambda certificate, _: certificate)
    chain, problem = filled(GAPPED, gap.path)
    assert (chain is GAPPED) == (problem is not None)
    assert {link.head for link in chain.links} <= {link.head for link in HEADS.links}


def judge_run_record(encoded: bytes) -> None:
    record = decode_record(RunRecord, encoded)
    check_announcement(record)
    check_run_id(record)


def judge_subkey(encoded: bytes) -> None:
    owner_of(encoded)
    validator = SignedRecords(identity(), lambda _: None)
    record = DHTRecord(b"k" * 20, encoded, encoded, get_dht_time() + 60)
    assert not validator.validate(record)


def judge_node(encoded: bytes) -> None:
    found = first_message(encoded, MAX_STRANGER_BYTES)
    if found is not None:
        node_of(found[0])


def judge_msgpack(encoded: bytes) -> None:
    is_bytes(encoded)
    value = BoundedSerializer(lambda _: None).loads(encoded)
    assert structure_problem(encoded) is None
    if isinstance(value, DictionaryDHTValue):
        validator = SignedRecords(identity(), lambda _: None)
        for subkey, (item, expiration) in value.items():
            try:
                packed = MSGPackSerializer.dumps(subkey)
            except (TypeError, ValueError, OverflowError):
                continue
            assert not validator.validate(DHTRecord(b"k" * 20, packed, item, expiration))


def judge_config(encoded: bytes) -> None:
    run = decode_config(encoded, RUN_OF_CONFIG)
    layout_of(run)


def read_toml(encoded: bytes) -> None:
    text = encoded.decode(errors="replace")
    parse_config(PeerConfig if text.startswith("[peer]") else RunConfig, text, source="file")


def read_bulk(encoded: bytes) -> None:
    if len(encoded) >= ASK_BYTES:
        assert Ask.decode(encoded[:ASK_BYTES]).encode()[:48] == encoded[:48]
    if len(encoded) >= HEAD_BYTES:
        assert Head.decode(encoded[:HEAD_BYTES]).encode() == encoded[:HEAD_BYTES]


def open_letter(encoded: bytes) -> None:
    stamp, content = split(open_sealed(encoded, "QmDestination").payload)
    RelayedMessages().take("QmA", stamp, SEALED_S)
    assert encoded == LETTER and content == b"question"


def read_stamp(encoded: bytes) -> None:
    """Reads the stamp of a correctly signed letter with any content."""
    known, (stamp, content) = RelayedMessages(), split(encoded)
    assert encoded[16:] == content
    known.take("QmA", stamp, SEALED_S)
    with pytest.raises(HostileInput):
        known.take("QmA", stamp, SEALED_S)


def show(encoded: bytes) -> None:
    for text in (encoded.decode("utf-8", "replace"), encoded.decode("latin-1")):
        assert printable(text).isprintable() or "…" in printable(text)


RUN_OF_CONFIG = RunRecord(
    run="exact-0123456789abcdef", name="exact", fingerprint=CONFIG.fingerprint(), founder="QmA",
    founding="0" * 64, founding_bytes=1, config="0" * 64, config_bytes=1, state=RUN.state,
    wait_for_peers=1,
)  # fmt: skip
DICTIONARY = DictionaryDHTValue()
DICTIONARY.store(identity().public_key, MSGPackSerializer.dumps(b"{}"), 2e9)
SEALED_S = 1.8e9
STAMPED = RelayedMessages().stamped("QmDestination", b"question", SEALED_S)
LETTER = seal(identity(), EnvelopeKind.REQUEST, "QmDestination", STAMPED)
HEADS = Chain(tuple(long_chain(9)))
GAPPED = without(HEADS.links, {3, 4, 5})
(GAP,) = gaps(GAPPED)
HOSTILE = (HostileInput,)
NODE = encoded_message(Node(8, 8, 3, ("1.0", "2.13.0")).message())
DECODERS: dict[str, Decoder] = {
    "message": Decoder(hear_message, HOSTILE, tuple(encode(HEADER, m)[0] for m in MESSAGES)),
    "beside": Decoder(hear_content, (), (*BLOBS.values(),)),
    "offer": Decoder(decode_offer, HOSTILE, (OFFER.encoded,)),
    "evidence": Decoder(
        judge_evidence, HOSTILE, (encode_evidence(SHOWN.evidence()), encode_evidence(EVIDENCE))
    ),
    "shown_manifest": Decoder(judge_shown_manifest, HOSTILE, (SHOWN.manifest().encoded,)),
    "manifest": Decoder(judge_manifest, HOSTILE, (TIP.encoded, NEXT.encoded)),
    "record": Decoder(
        chain_record.decode_record, HOSTILE, (chain_record.encode_record(Record(NEXT, None, TIP)),)
    ),
    "run_record": Decoder(
        judge_run_record,
        (HostileInput, RunMismatch),
        (encode_record(RUN), encode_record(RUN_OF_CONFIG)),
    ),
    "preparing": Decoder(decode_preparing, (), (encode_preparing(RUN.fingerprint),)),
    "peer_record": Decoder(lambda b: decode_record(PeerRecord, b), HOSTILE, (encode_record(PEER),)),
    "merge_record": Decoder(
        lambda b: decode_record(MergeRecord, b), HOSTILE, (encode_record(MERGE),)
    ),
    "validation_record": Decoder(
        lambda b: decode_record(ValidationRecord, b), HOSTILE, (encode_record(VALIDATION),)
    ),
    "score_record": Decoder(
        lambda b: decode_record(ScoreRecord, b), HOSTILE, (encode_record(SCORES),)
    ),
    "tokenizer": Decoder(
        lambda b: FileTokenizer.of(bytes(b)),
        (TokenizerError,),
        (train_tokenizer([b"a few words, and more"], 260).content,),
    ),
    "invitation": Decoder(
        lambda b: from_text(bytes(b).decode(errors="replace")),
        (InvitationError,),
        (as_text(PrivateInvitation(INVITATION, "0" * 64)).encode(),),
    ),
    "subkey": Decoder(
        judge_subkey, (), (MSGPackSerializer.dumps(identity().public_key), b"\xc4\x20" + bytes(32))
    ),
    "worker": Decoder(judge_node, HOSTILE, (NODE,)),
    "delta": Decoder(judge_delta, HOSTILE, DELTAS),
    "msgpack": Decoder(
        judge_msgpack,
        HOSTILE,
        tuple(MSGPackSerializer.dumps(v) for v in (DICTIONARY, (1, (2, [3, {"a": b"b"}])), b"x")),
    ),
    "config": Decoder(judge_config, (HostileInput, RunMismatch), (CONFIG.canonical_json(),)),
    "toml": Decoder(
        read_toml,
        (ConfigError,),
        (EXACT.encode(), b'[peer]\nname = "x"\n[network]\nclient_mode = true\n'),
    ),
    "envelope": Decoder(open_letter, HOSTILE, (LETTER,)),
    "stamp": Decoder(read_stamp, HOSTILE, (STAMPED,)),
    "relayed": Decoder(_addressed, HOSTILE, (b"\x03QmAletter",)),
    "signature": Decoder(
        lambda b: verify(b[:52].decode("latin-1"), b"data", b[52:]),
        (),
        (identity().peer_id.encode() + identity().sign(b"other data"),),
    ),
    "bulk": Decoder(read_bulk, (), (Ask("0" * 64, 1, 2, True).encode(), Head(1, 2, 3).encode())),
    "moments_question": Decoder(decode_question, HOSTILE, (encode_question(("0" * 64,)),)),
    "moments_answer": Decoder(
        decode_answer, HOSTILE, (encode_answer([Moments(1, 2, "0" * 64, 3)]),)
    ),
    "heads_question": Decoder(ask_for_heads, HOSTILE, (encode_heads_question(GAP.question),)),
    "heads": Decoder(show_heads, HOSTILE, (encode_page(between(HEADS, GAP.question)),)),
    "address": Decoder(
        lambda b: Address.parse(b.decode("utf-8", "replace")),
        (ConfigError,),
        (b"/ip4/10.0.0.1/tcp/4001/p2p/12D3KooWBR76SzBMKcnnUrWNsp3AEcVYdWWm8J6mBzVDzwj4XJGU",),
    ),
    "text": Decoder(show, (), ("Zoë's 機械 \x1b[2J \u202e".encode(),)),
}


def feed(name: str, encoded: bytes) -> None:
    decoder, began = DECODERS[name], time.process_time()
    try:
        decoder.read(encoded)
    except decoder.allowed as error:
        assert len(str(error)) < 5000
    assert time.process_time() - began < LONGEST_S


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_what_once_did_harm_does_none(path: Path) -> None:
    feed(path.name.partition("-")[0], path.read_bytes())


@pytest.mark.parametrize("name", DECODERS)
def test_sound_bytes_are_read(name: str) -> None:
    """Otherwise the fuzzer would only try the first check."""
    decoder = DECODERS[name]
    for sample in decoder.samples:
        try:
            decoder.read(sample)
        except decoder.allowed as error:
            # A sample of an announcement contradicts its id, and manifests have another layout.
            assert isinstance(error, RunMismatch) or "units are not those" in str(error), name


def fuzz(name: str, inputs: int) -> None:
    # A finding is kept without shrinking, which takes minutes.
    @settings(
        max_examples=inputs,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate),
    )
    @given(encoded=spoilt(DECODERS[name].samples))
    def every_input(encoded: bytes) -> None:
        feed(name, encoded)

    every_input()


@pytest.mark.parametrize("name", DECODERS)
def test_spoilt_bytes_raise_nothing_but_the_projects_errors(name: str) -> None:
    fuzz(name, 60)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DECODERS)
def test_a_million_spoilt_inputs(name: str) -> None:
    fuzz(name, -(-EXHAUSTIVE // len(DECODERS)))
