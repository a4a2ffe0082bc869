"""Continues a text with an exported model, token by token."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from swarm.errors import ConfigError, CorruptState
from swarm.export.manager import LATEST

if TYPE_CHECKING:
    from transformers import TextStreamer

logger = logging.getLogger(__name__)

NEEDED = ("config.json", "tokenizer.json")


@dataclass(frozen=True)
class Sampling:
    """Options for choosing the next token.

    Attributes:
        max_new_tokens: most new tokens. The model may end the text earlier.
        temperature: divisor of logits. 0 always takes the most likely token.
        top_p: tokens are drawn only from the most likely ones with this total probability.
        seed: equal seeds draw equal tokens. None draws with a new seed each time.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None = None


def require_export(folder: Path) -> None:
    """Refuses a folder without an exported model, before any heavy import.

    Raises:
        ConfigError: the path is no folder, a file is missing, or Transformers is not installed.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder", hint="swarm-export --out DIR writes one")
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    missing += [] if any(folder.glob("model*.safetensors")) else ["model.safetensors"]
    if missing and (folder / LATEST).is_dir():
        raise ConfigError(f"{folder} holds several exports", hint=f"name {folder / LATEST}")
    if missing:
        raise ConfigError(
            f"{folder} is no exported model: {', '.join(missing)} is not there",
            hint="name a folder that swarm-export has written",
        )
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "the package transformers is not installed", hint="pip install 'moe-swarm[hf]'"
        )


def generate(folder: Path, prompt: str, sampling: Sampling, show: Callable[[str], None]) -> None:
    """Shows a text that begins with the prompt, piece by piece.

    The prompt is the beginning of a document, so it follows an end-of-text token, as in training.
    The model runs on a CPU or the first GPU, in the type of the weights.

    Args:
        folder: folder of the export.
        prompt: may be empty.
        sampling: options for choosing tokens.
        show: called with each piece of text, the prompt first.

    Raises:
        ConfigError: the folder is no exported model, the model needs its own code to run, or the
            prompt exceeds its context.
        CorruptState: the files cannot be read.
    """
    require_export(folder)
    model, tokenizer = _loaded(folder)
    end_of_text = model.config.eos_token_id
    ids = [] if end_of_text is None else [end_of_text]
    ids += tokenizer(prompt, add_special_tokens=False).input_ids
    room = model.config.max_position_embeddings - len(ids)
    if room < 1:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens, the model reads "
            f"{model.config.max_position_embeddings} at once",
            hint="shorten the prompt",
        )
    if sampling.max_new_tokens > room:
        logger.warning("the model's context ends after %d new tokens", room)
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    show(prompt)
    chosen: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        chosen = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
    input_ids = torch.tensor([ids], device=model.device)
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=min(sampling.max_new_tokens, room),
        streamer=_streamer(tokenizer, show),
        **chosen,
    )


def _loaded(folder: Path) -> tuple[Any, Any]:
    # Transformers takes seconds to load, so the folder is checked first.
    from transformers import AutoModelForCausalLM, AutoTokenizer  # as said above
    from transformers.utils import logging as theirs  # as said above

    theirs.disable_progress_bar()
    # Without this, Transformers asks on a terminal whether code of the folder may run.
    how = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **how)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **how)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{folder}: its model is code that comes with it, which is not run",
                hint="name a folder that swarm-export has written: it holds no code",
            ) from error
        raise CorruptState(
            f"{folder} cannot be loaded: {str(error).splitlines()[0]}", hint="export it again"
        ) from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def _streamer(tokenizer: Any, show: Callable[[str], None]) -> TextStreamer:
    from transformers import TextStreamer  # its base class comes from Transformers

    class Shown(TextStreamer):
        """Shows whole characters as soon as they are complete."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002
            show(text)

    return Shown(tokenizer, skip_prompt=True, skip_special_tokens=True)
