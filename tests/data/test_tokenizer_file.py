"""A tokenizer from a file, perhaps a stranger's: bounded, refused, or run in another process."""

import json
import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers

from swarm.data import encoders
from swarm.data.tokenizer_file import FileTokenizer, open_tokenizer
from swarm.errors import TokenizerError

END = "<|endoftext|>"
SPECIALS = (END, "<|im_start|>", "<|pad|>")
LIBRARY = Path(sysconfig.get_path("stdlib"))


def library_text(size: int) -> str:
    parts, length = [], 0
    for path in sorted(LIBRARY.glob("*.py")):
        parts.append(path.read_text(encoding="utf-8"))
        length += len(parts[-1])
        if length >= size:
            break
    return "".join(parts)[:size]


def trained(vocab_size: int = 600) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([library_text(60_000)], trainer)
    return made


@pytest.fixture(scope="module")
def content() -> bytes:
    return trained().to_str().encode()


def changed(content: bytes, **values: object) -> bytes:
    return json.dumps(json.loads(content) | values).encode()


def with_model(content: bytes, **values: object) -> bytes:
    return changed(content, model=json.loads(content)["model"] | values)


def test_a_file_says_its_ids_and_its_end_of_text(content: bytes) -> None:
    found = FileTokenizer.of(content)
    assert (found.num_ids, found.end_of_text, found.end_of_text_token) == (600, 0, END)
    by_id, by_name = FileTokenizer.of(content, 1), FileTokenizer.of(content, "<|im_start|>")
    assert by_id == by_name and by_id.end_of_text == 1
    assert by_id.name != found.name, "the closing id is part of its behavior"
    assert found.name == FileTokenizer.of(content).name
    assert found.name != FileTokenizer.of(content + b"\n").name


def test_text_that_spells_a_special_token_stays_text(content: bytes) -> None:
    documents = [f"a {END} b<|im_start|>c".encode(), END.encode(), "é\u4e2d\U0001f600".encode()]
    found = list(FileTokenizer.of(content).encoded(documents))
    decoder = tokenizers.Tokenizer.from_str(content.decode())
    for document, tokens in zip(documents, found, strict=True):
        assert tokens[-1] == 0 and not np.isin(tokens[:-1], [0, 1, 2]).any()
        text = decoder.decode(tokens[:-1].tolist(), skip_special_tokens=False)
        assert text.encode() == document


def test_documents_come_back_in_their_order_whatever_the_number_of_processes(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "BATCH_BYTES", 500)
    documents = [f"{number} ".encode() * (1 + number % 40) for number in range(300)]
    one, three = (
        [tokens.tolist() for tokens in encoders.encode(content, 0, documents, workers=count)]
        for count in (1, 3)
    )
    assert one == three and len(one) == 300
    taken = encoders.encode(content, 0, iter(documents), workers=2)
    assert next(taken).tolist() == one[0]
    taken.close()  # ends its processes


DEEP = b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b"", "not a tokenizer.json"),
        (b"\xff\xfe", "not a tokenizer.json"),
        (DEEP, "not a tokenizer.json"),
        (b'{"model":{"a":' * 50_000 + b"1" + b"}}" * 50_000, "not a tokenizer.json"),
        (b"[" + b"[]," * 3_000_000 + b"[]]", "too many values"),
        (b"[" + b"1," * 9_000_000 + b"1]", "too many values"),
        (b" " * (64 * 2**20 + 1), "limit"),
        (b'{"model": {"type": "BPE"}}', "without added tokens"),
        (b'{"model": {}, "added_tokens": []}', "model is one of"),
        (b'{"model": {"type": "BPE", "vocab": 1}, "added_tokens": []}', "without its vocabulary"),
        (b'{"model": {"type": "BPE", "vocab": {"a": -1}}, "added_tokens": []}', "no number"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 9999999}}, "added_tokens": []}', "no number"),
        (b'{"model": {"type": "BPE", "vocab": {"a": true}}, "added_tokens": []}', "no number"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": []}', "no special token"),
        (b'{"model": {"type": "BPE", "vocab": {}}, "added_tokens": [1]}', "without added tokens"),
        (b'{"model": {"type": "BPE", "vocab": {}}, "added_tokens": [{"id": 0}]}', "no spelling"),
    ],
)
def test_what_no_run_can_have_is_refused_without_being_run(bad: bytes, words: str) -> None:
    with pytest.raises(TokenizerError, match=words):
        FileTokenizer.of(bad)


def test_dropout_is_refused_since_nobody_would_get_the_same_tokens(content: bytes) -> None:
    with pytest.raises(TokenizerError, match="differently each time"):
        FileTokenizer.of(with_model(content, dropout=0.1))


def test_a_token_that_is_not_special_closes_no_document(content: bytes) -> None:
    ordinary = [token | {"special": False} for token in json.loads(content)["added_tokens"]]
    with pytest.raises(TokenizerError, match="no special token"):
        FileTokenizer.of(changed(content, added_tokens=ordinary))
    with pytest.raises(TokenizerError, match="no special token 'hello'"):
        FileTokenizer.of(content, "hello")


@pytest.mark.parametrize(
    "damage",
    [
        {"pre_tokenizer": {"type": "Nonsense"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
        {"post_processor": [[[[1]]]]},
    ],
)
def test_what_cannot_be_loaded_ends_another_process_and_is_a_typed_error(
    content: bytes, damage: dict[str, object]
) -> None:
    tokenizer = FileTokenizer.of(changed(content, **damage))
    with pytest.raises(TokenizerError, match="cannot be run: exit code 1"):
        list(tokenizer.encoded([b"text"]))


def test_a_regular_expression_without_end_is_killed(content: bytes) -> None:
    endless = {"type": "Split", "pattern": {"Regex": r"(x+x+)+y"}, "behavior": "Isolated"}
    hostile = changed(content, pre_tokenizer=endless | {"invert": False})
    with pytest.raises(TokenizerError, match=r"took more than 1 s for 65,536 bytes|exit code"):
        list(encoders.encode(hostile, 0, [b"x" * 65_536], workers=1, batch_s=1.0))


def test_a_normaliser_that_multiplies_its_text_cannot_take_the_machines_memory(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "MEMORY_BYTES", 2**29)
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    bomb = {"type": "Sequence", "normalizers": [step] * 8}
    hostile = changed(content, normalizer=bomb)
    with pytest.raises(TokenizerError, match="cannot be run: exit code"):
        list(encoders.encode(hostile, 0, [b"aaaa"], workers=1))


def test_a_text_that_makes_the_end_of_text_id_is_an_error(content: bytes) -> None:
    letter = json.loads(content)["model"]["vocab"]["a"]
    with pytest.raises(TokenizerError, match=f"ordinary text as its end-of-text id {letter}"):
        list(encoders.encode(content, letter, [b"banana"]))


def test_without_the_package_the_error_says_what_to_install(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TokenizerError, match="pip install tokenizers"):
        list(FileTokenizer.of(content).encoded([b"text"]))


def test_a_folder_names_its_end_of_text(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"No such file.*train-tokenizer"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert open_tokenizer(tmp_path).end_of_text_token == END
    for named in ("<|pad|>", {"content": "<|pad|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        assert open_tokenizer(tmp_path).end_of_text_token == "<|pad|>"
    (tmp_path / "tokenizer_config.json").write_text("[1")
    assert open_tokenizer(tmp_path / "tokenizer.json").end_of_text_token == END


def spelled_out(size: int) -> str:
    """Library text with special tokens spelled out all over it."""
    random_ = random.Random(5)
    text = library_text(size)
    places = sorted(random_.randrange(len(text)) for _ in range(1000))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    return "".join(part + random_.choice(SPECIALS) for part in parts)


@pytest.mark.parametrize("adds_tokens", [False, True])
def test_what_transformers_loads_gives_the_same_ids_on_a_megabyte(
    content: bytes, tmp_path: Path, adds_tokens: bool
) -> None:
    if adds_tokens:  # which no document of a run has
        begin = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
        after = {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {
                "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
            },
        }
        cut = {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
        content = changed(content, post_processor=after, truncation=cut)
    tokenizer = FileTokenizer.of(content)
    tokenizer.save(tmp_path, model_max_length=64)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = spelled_out(1_000_000)
    assert text.count(END) > 100
    (tokens,) = tokenizer.encoded([text.encode()])
    assert loaded(text)["input_ids"] == tokens[:-1].tolist()
    assert loaded.eos_token_id == tokenizer.end_of_text and loaded.model_max_length == 64
