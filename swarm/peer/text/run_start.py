"""The founder's tokenizer and initial weights of a run, if they do not follow from the seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from swarm.config import RunConfig
from swarm.data.encoders import require_package
from swarm.data.tokenizer import BYTE, Tokenizer, require_vocabulary
from swarm.data.tokenizer_file import open_tokenizer
from swarm.errors import ConfigError
from swarm.experts import lacking
from swarm.model.pretrained import Checkpoint, open_checkpoint


def founders_tokenizer(run: RunConfig, folder: Path | None) -> Tokenizer:
    """The tokenizer that a founder gives its run.

    Raises:
        ConfigError: the run needs a tokenizer file, but none was named; or the run uses bytes, but
            a file was named; or the run's vocabulary is too small.
        TokenizerError: the named file is no tokenizer, or cannot run here.
    """
    if run.data.tokenizer == "byte" and folder is not None:
        raise ConfigError(
            f'{folder} was named as the tokenizer, and the run has data.tokenizer = "byte"',
            hint="--set data.tokenizer=file",
        )
    if run.data.tokenizer != "byte" and folder is None:
        raise ConfigError(
            'data.tokenizer = "file": no tokenizer was named',
            hint="--tokenizer DIR, a folder with a tokenizer.json",
        )
    tokenizer: Tokenizer = BYTE if folder is None else open_tokenizer(folder)
    require_vocabulary(run, tokenizer)
    if folder is not None:
        require_package()
    return tokenizer


def founders_weights(
    run: RunConfig, folder: Path | None, weights: Mapping[str, Tensor] | None = None
) -> Mapping[str, Tensor] | None:
    """The weights that a founder gives its run; None for weights from the run's seed.

    Args:
        run: the run to be founded.
        folder: the checkpoint that a person named, if any.
        weights: weights from a script, in place of a checkpoint.

    Raises:
        ConfigError: the run needs given weights and there are none, or the reverse; or a tensor is
            missing; or the checkpoint is of another model, see `open_checkpoint`.
        CorruptState: the checkpoint is damaged.
    """
    is_given = folder is not None or weights is not None
    if run.run.initial == "given" and not is_given:
        raise ConfigError(
            'run.initial = "given": no checkpoint was named',
            hint="--initialise-from DIR; a peer that joins needs --initial-peers ADDRESS instead",
        )
    if run.run.initial == "seed" and is_given:
        raise ConfigError(
            'weights were given, and the run has run.initial = "seed"',
            hint="--set run.initial=given",
        )
    if weights is not None and (missing := lacking(run.model, weights.keys())):
        raise ConfigError(missing, hint="give every tensor, as swarm.load_export does")
    return open_checkpoint(folder, run) if folder else weights


def rounding_notice(run: RunConfig, weights: Mapping[str, Tensor] | None) -> str | None:
    """A sentence for a person if the wire rounds the given weights."""
    if weights is None or (isinstance(weights, Checkpoint) and weights.is_bf16):
        return None
    codecs = {"wire.shared": run.wire.shared, "wire.experts": run.wire.experts}
    rounded = [key for key, codec in codecs.items() if codec == "bf16"]
    if not rounded:
        return None
    return (
        f"The checkpoint is rounded to bf16 once, since {' and '.join(rounded)} "
        f"{'is' if len(rounded) == 1 else 'are'} bf16; fp32 keeps it as it is."
    )
