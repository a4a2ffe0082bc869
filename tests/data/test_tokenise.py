import hypothesis.strategies as st
import pytest
import transformers
from hypothesis import given

from swarm.data.tokenizer import BYTE, END_OF_TEXT, PAD, document_tokens

AWKWARD = (
    "".join(map(chr, range(0x200)))
    + " \t two  spaces\r\n\n'll don't \u200b\ufeff e\u0301 \U0001f600\U0001f468\u200d\U0001f469 "
    + "<|endoftext|> <|pad|> \u4e2d\u6587 \U0010ffff"
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    BYTE.save(folder, model_max_length=4096)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_a_document_is_its_bytes_and_an_end():
    assert document_tokens("é\x00".encode()).tolist() == [0xC3, 0xA9, 0, END_OF_TEXT]


def test_the_name_of_the_tokenizer_binds_its_ids():
    """Manifest 0 of a run contains this name. A changed id makes another tokenizer."""
    assert BYTE.name == "byte-0a07252260757e91"


def test_the_exported_tokenizer_knows_its_length_and_specials(exported):
    assert (len(exported), exported.model_max_length) == (258, 4096)
    assert (exported.eos_token_id, exported.pad_token_id) == (END_OF_TEXT, PAD)
    assert exported.bos_token is None


def test_the_exported_tokenizer_gives_the_bytes_of_awkward_text(exported):
    assert exported(AWKWARD)["input_ids"] == list(AWKWARD.encode())
    assert exported.decode(list(AWKWARD.encode())) == AWKWARD
    assert exported.decode([*AWKWARD.encode(), END_OF_TEXT], skip_special_tokens=True) == AWKWARD


@given(text=st.text())
def test_the_exported_tokenizer_gives_the_bytes_of_any_text(exported, text):
    ids = exported(text)["input_ids"]
    assert ids == document_tokens(text.encode())[:-1].tolist()
    assert exported.decode(ids) == text


def test_saving_it_again_from_transformers_changes_nothing(exported, tmp_path):
    exported.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again(AWKWARD)["input_ids"] == list(AWKWARD.encode())
