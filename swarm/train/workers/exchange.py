"""Messages between a controller and its workers: lines of JSON, and tensors in files.

A line may come with one open file, passed as a descriptor. The file has tensors for the worker,
which the line lists by name, or is empty and receives the tensors of the answer. Nothing is
pickled, and nothing needs a shared-memory file system. Between machines `controller_wire.py`
carries the same messages.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from swarm.data.masks import Masks
from swarm.errors import CorruptState
from swarm.model.routing import RoutingControls
from swarm.train.engine.engine import EngineState, StepStats
from swarm.train.engine.engine_options import ActivationCheckpoints, EngineKind, EngineOptions
from swarm.train.engine.guard import LossScale
from swarm.train.engine.tensor_file import OpenFile, Place, TensorFile

Message = dict[str, Any]
ENUMS = {"kind": EngineKind, "activation_checkpoints": ActivationCheckpoints}
"""Options of an engine whose type JSON lacks."""
RECEIVED_BYTES = 2**16


class Closed(Exception):
    """The other side of a socket is lost."""


class Channel:
    """Messages over one end of a pair of Unix sockets. Any thread may send, one receives."""

    def __init__(self, end: socket.socket) -> None:
        """Takes ownership of the socket, which may have a time-out."""
        self.socket = end
        self._sending = threading.Lock()
        self._received = b""
        self._descriptors: list[int] = []

    def send(self, message: Message, file: TensorFile | None = None) -> None:
        """Sends a message and its file.

        Raises:
            Closed: the other side has ended, or does not read within the socket's time-out.
        """
        line = json.dumps(message | {"has_file": file is not None}).encode() + b"\n"
        try:
            files = [] if file is None else [file.file.descriptor]
            with self._sending:
                sent = socket.send_fds(self.socket, [line], files)
                self.socket.sendall(line[sent:])
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self) -> None:
        """Waits for bytes of the other side. `take` returns the messages that they complete.

        Raises:
            Closed: no bytes will come.
        """
        try:
            content, files, _, _ = socket.recv_fds(self.socket, RECEIVED_BYTES, 8)
        except OSError as error:
            raise Closed(str(error)) from error
        if not content:
            raise Closed("the socket is closed")
        self._received += content
        self._descriptors += files

    def take(self) -> tuple[Message, OpenFile | None] | None:
        """The next complete message and its file. None if there is none yet."""
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        message: Message = json.loads(line)
        has_file = message.pop("has_file")
        return message, OpenFile(self._descriptors.pop(0)) if has_file else None

    def close(self) -> None:
        """Closes the socket and unread files."""
        self.socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


class Answer(TensorFile):
    """A file for an answer, shared with other ranks that write to it.

    Attributes:
        mine: names of the tensors that this rank has put into the file.
    """

    def __init__(self, file: OpenFile) -> None:
        super().__init__(file, {})
        self.mine: list[str] = []

    def put(self, name: str, tensor: Tensor) -> None:
        """See `TensorFile`."""
        super().put(name, tensor)
        self.mine.append(name)


def listed(file: TensorFile) -> dict[str, Any]:
    """The places of the tensors of a file, for JSON."""
    return {
        name: [place.offset, dtype_name(place.dtype), place.shape]
        for name, place in file.places.items()
    }


def opened(file: OpenFile, tensors: Mapping[str, Any]) -> TensorFile:
    """The file whose tensors were `listed`."""
    return TensorFile(
        file,
        {
            name: Place(offset, dtype_named(dtype), tuple(shape))
            for name, (offset, dtype, shape) in tensors.items()
        },
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type, for `dtype_named`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The type of tensors whose `str` is "torch.NAME"."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise CorruptState(f"{name} is no type of tensors")
    return dtype


def options_message(options: EngineOptions) -> Message:
    """The options of a worker's engine, for JSON, without frozen experts on disk."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    del values["frozen_folder"], values["frozen_lent"]
    kinds = {name: values[name].value for name in ENUMS}
    return values | kinds


def options_of(message: Message) -> EngineOptions:
    """The options of an `options_message`."""
    return EngineOptions(**message | {name: kind(message[name]) for name, kind in ENUMS.items()})


def state_message(state: EngineState) -> Message:
    """A private state without its tensors, for JSON."""
    return {"counts": state.counts, "scale": [state.scale.value, state.scale.good_steps]}


def state_of(message: Message, tensors: Mapping[str, Tensor]) -> EngineState:
    """A private state from its `state_message` and its tensors."""
    owned, updates, skipped, skipped_in_a_row = message["counts"]
    scale = LossScale(*message["scale"])
    return EngineState(tensors, tuple(owned), updates, skipped, skipped_in_a_row, scale)


def controls_of(values: Mapping[str, Any] | None) -> RoutingControls | None:
    """Routing controls from their fields."""
    return None if values is None else RoutingControls(**values)


def controls_message(controls: RoutingControls | None) -> Message | None:
    """The fields of routing controls, for JSON."""
    return None if controls is None else dataclasses.asdict(controls)


def masks_tensors(masks: Masks | None) -> dict[str, Tensor]:
    """The masks of a batch that exist, by name."""
    named = {"starts": masks.starts_BT, "scored": masks.scored_BT} if masks else {}
    return {name: mask for name, mask in named.items() if mask is not None}


def masks_of(tensors: Mapping[str, Tensor]) -> Masks | None:
    """The masks among the tensors of a step."""
    starts_BT, scored_BT = tensors.get("starts"), tensors.get("scored")
    return None if starts_BT is None and scored_BT is None else Masks(starts_BT, scored_BT)


def stats_of(values: Mapping[str, Any]) -> StepStats:
    """`StepStats` from its fields, with JSON's lists as tuples. Without the workers."""
    pairs = tuple((first, second, alike) for first, second, alike in values["pairs"])
    tokens = tuple(tuple(layer) for layer in values["expert_tokens"])
    return StepStats(**{**values, "pairs": pairs, "expert_tokens": tokens, "workers": ()})
