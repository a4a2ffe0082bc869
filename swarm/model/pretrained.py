"""The tensors of a checkpoint folder, each read on look-up.

So a run can start from a model that does not fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from swarm.config import RunConfig
from swarm.errors import ConfigError, CorruptState
from swarm.experts import LAYOUTS, Shape, Stored, all_shapes, exported, misfit
from swarm.model.described import require_same_model
from swarm.model.huggingface import tensor_files, unused_shapes
from swarm.model.initial_weights import initial_tensors

TYPES = ("bf16", "f16", "f32")
_IGNORED = "rotary_emb.inv_freq"
"""Buffers that follow from `rope_theta`. Some older checkpoints hold them."""


class TensorFiles(Mapping[str, Tensor]):
    """Tensors of the safetensors files in a folder, in their stored form.

    The files stay mapped, so later replacements of the files are not mixed in.

    Attributes:
        shapes: shape of each tensor by name, from the files' headers.
        types: type of each tensor by name, such as "bf16".

    Raises:
        CorruptState: a file is missing or damaged, or two files hold the same tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, Shape] = {}
        self.types: dict[str, str] = {}
        self._paths: dict[str, Path] = {}
        self._files: dict[str, Any] = {}
        for file in tensor_files(folder):
            self._read_header(folder / file)

    def _read_header(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
            stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            headers = {n: (tuple(s.get_shape()), s.get_dtype().lower()) for n, s in stored.items()}
        except (OSError, SafetensorError) as error:
            raise CorruptState(f"{path}: {error}") from error
        for name, (shape, kind) in headers.items():
            if name in self._paths:
                raise CorruptState(f"{path}: {name} is in {self._paths[name].name} too")
            self.shapes[name], self.types[name] = shape, kind
            self._paths[name], self._files[name] = path, file

    def __getitem__(self, name: str) -> Tensor:
        """Reads a tensor from its file."""
        return self.read(Stored(name, self.shapes[name]))

    def read(self, stored: Stored) -> Tensor:
        """Copies a tensor, or only a part of it, out of its mapped file.

        Raises:
            CorruptState: the file cannot be read.
        """
        file, name = self._files[stored.name], stored.name
        try:
            found = file.get_slice(name)[stored.part] if stored.part else file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CorruptState(f"{self._paths[name]}: {error}") from error
        tensor: Tensor = found.clone()
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._paths  # without reading the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def require(self, wanted: Mapping[str, Shape], folder: Path, *, optional: set[str]) -> None:
        """Refuses a folder with other tensors than these.

        Args:
            wanted: shapes by name.
            folder: named in errors.
            optional: names that may be missing.

        Raises:
            ConfigError: names the first tensor that is missing, extra, or of another shape or type.
        """
        for name in sorted(self.keys() | wanted.keys()):
            if name in optional or name.endswith(_IGNORED):
                continue
            if why := misfit(name, self.shapes.get(name), wanted.get(name)):
                raise ConfigError(f"{folder} does not fit: {why}")
            if (kind := self.types[name]) not in TYPES:
                known = ", ".join(TYPES)
                raise ConfigError(f"{folder}: {name} is of type {kind}; {known} can be read")


def finite(name: str, tensor: Tensor) -> Tensor:
    """A tensor in fp32.

    Raises:
        CorruptState: it contains an infinite value or a NaN.
    """
    if not bool(tensor.isfinite().all()):
        raise CorruptState(f"{name} has values that are not finite", hint="download it again")
    return tensor.float()


class Checkpoint(Mapping[str, Tensor]):
    """Every tensor of a run's model, fp32, by Hugging Face name. Each is read on look-up.

    A tensor that only training uses is in no checkpoint, and has its initial value.
    """

    def __init__(self, run: RunConfig, files: TensorFiles, places: Mapping[str, Stored]) -> None:
        self._run, self._files, self._places = run, files, places
        self._shapes = all_shapes(run.model)

    @property
    def is_bf16(self) -> bool:
        """Whether bf16 holds all values exactly."""
        return set(self._files.types.values()) == {"bf16"}

    def __getitem__(self, name: str) -> Tensor:
        """Reads a tensor. Raises CorruptState if the file is damaged or has a non-finite value."""
        if name not in self._shapes:
            raise KeyError(name)
        if not exported(name):
            return initial_tensors(self._run, [name])[name]
        return finite(name, self._files.read(self._places[name]))

    def __contains__(self, name: object) -> bool:
        return name in self._shapes  # without reading the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def open_checkpoint(folder: Path, run: RunConfig) -> Checkpoint:
    """The start of a run from a folder that Transformers or this software has written.

    Reads config.json and the headers of the safetensors files, but no tensor.

    Args:
        folder: a Qwen3-MoE, OLMoE, Mixtral or dots.llm1 without shared experts, in fp32, fp16 or
            bf16. It may be whole or in shards with an index, in any of `LAYOUTS`.
        run: the run whose model the checkpoint must have.

    Raises:
        ConfigError: there is no config.json, our decoder cannot compute the model, or it is not the
            run's model. The error names the key or the tensor.
        CorruptState: a file of tensors is missing or damaged.
    """
    folder = folder.expanduser()
    require_same_model(run, folder)
    files = TensorFiles(folder)
    places = _places(run, files)
    wanted = {place.name: place.shape for place in places.values()}
    # A tied head that is stored nevertheless is never read. Transformers does not read it either.
    optional = {"lm_head.weight"} if run.model.tie_word_embeddings else set()
    files.require(wanted, folder, optional=optional | unused_shapes(run).keys())
    return Checkpoint(run, files, places)


def _places(run: RunConfig, files: TensorFiles) -> dict[str, Stored]:
    """The place of each tensor of the model in the files, by the layout that fits them best."""
    shapes = {name: shape for name, shape in all_shapes(run.model).items() if exported(name)}
    layout = max(LAYOUTS, key=lambda each: len({each.name(n) for n in shapes} & files.keys()))
    return {n: layout.stored(n, shape, run.model.num_experts) for n, shape in shapes.items()}
