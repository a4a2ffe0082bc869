"""The held-out text of a run, spelled again from the tokens that its manifest 0 names."""

from __future__ import annotations

import itertools

import numpy as np

from swarm.data.held_out import split_documents
from swarm.errors import DataError
from swarm.peer.agreed_model import AgreedModel
from swarm.peer.live_model import held_out_tokens


def held_out_text(model: AgreedModel) -> list[str]:
    """The founder's held-out documents.

    Raises:
        DataError: the tokens are not those that the run's tokenizer makes of a text of as many
            bytes, so the text is not known; some tokenizers forget how a text was written.
        TokenizerError: the tokenizer cannot be run here.
        BadBlob: the tokens are not of the run's vocabulary.
    """
    tokens, end_of_text, num_bytes = held_out_tokens(model.manifest, model.run, model.store)
    tokenizer = model.tokenizer()
    documents = list(split_documents(tokens, end_of_text))
    found = tokenizer.decoded(documents)
    again = tokenizer.encoded(found)
    same = sum(map(len, found)) == num_bytes and all(
        ours is not None and theirs is not None and np.array_equal(ours, theirs[:-1])
        for ours, theirs in itertools.zip_longest(documents, again)
    )
    try:
        text = [document.decode() for document in found]
    except UnicodeDecodeError:
        same = False
    if not same:
        raise DataError(
            "the run's tokenizer does not give back the held-out text, so other programs cannot "
            "be handed it"
        )
    return text
