"""A process that holds one rank of a `ParallelEngine`.

Started as `python -m swarm.train.workers.worker_process FD`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swarm.background import SYSTEM, Joinable
from swarm.config import RunConfig
from swarm.errors import SwarmError, lacks_memory
from swarm.experts import Slice
from swarm.train.engine.engine import EngineState
from swarm.train.engine.engine_options import EngineKind, EngineOptions
from swarm.train.engine.ranks import COLLECTIVE_S, Disconnected, Ranks, meeting_at
from swarm.train.engine.tensor_file import Form, JoinedFiles, OpenFile, TensorFile
from swarm.train.parallel.data_parallel import RankEngine
from swarm.train.parallel.sharded_state import ShardedEngine
from swarm.train.parallel.streaming_rank import StreamingRank
from swarm.train.parallel.tensor_parallel import HeadsEngine
from swarm.train.workers import command_history, exchange


def step_of(
    engine: RankEngine | StreamingRank,
    ranks: Ranks,
    message: exchange.Message,
    given: Mapping[str, Tensor],
) -> Callable[[], exchange.Message]:
    """Prepares the step of a message, and reads its tensors now."""
    controls = exchange.controls_of(message["controls"])
    masks, tokens_BT1 = exchange.masks_of(given), given["tokens"]

    def step() -> exchange.Message:
        ranks.traffic.take()  # of earlier commands
        began_s = time.perf_counter()
        stats = engine.step(tokens_BT1, lr=message["lr"], controls=controls, masks=masks)
        figures = engine.figures(len(tokens_BT1), time.perf_counter() - began_s)
        return {
            "stats": dataclasses.asdict(stats),
            "skipped": engine.skipped,
            "figures": dataclasses.asdict(figures),
        }

    return step


class SplitStep:
    """One step that pauses before it changes any value.

    Attributes:
        state: the private state before the step, as views.
    """

    def __init__(
        self,
        engine: RankEngine | StreamingRank,
        step: Callable[[], exchange.Message],
        *,
        is_beside: bool,
    ) -> None:
        """Begins the step.

        Args:
            engine: engine of the rank.
            step: makes the step with the engine, and returns the answer.
            is_beside: whether the engine can be read during the step. If not, `finish` makes the
                whole step.
        """
        self.state: EngineState = engine.state_dict()
        self._step = step
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._stands, self._may_go = threading.Event(), threading.Event()
        self._stood_s = 0.0
        self._answer: exchange.Message | None = None
        self._error: BaseException | None = None
        self._thread: Joinable | None = None
        if is_beside and engine.before_update(self._hold):
            self._thread = SYSTEM.start(self._run, "swarm-step")

    @property
    def stands(self) -> bool:
        """Whether the step has paused, or has ended without a change."""
        return self._thread is None or self._stands.is_set()

    def wait(self) -> None:
        """Waits for the pause, in which values may be changed."""
        if self._thread is not None:
            self._stands.wait()

    def finish(self) -> exchange.Message:
        """Continues the step. Returns its answer or raises its error."""
        if self._thread is None:
            return self._step()
        self._may_go.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        self._answer["figures"]["seconds"] -= self._stood_s
        return self._answer

    def _hold(self) -> None:
        # An engine also makes this call in later steps, which do not pause.
        self._stands.set()
        began_s = time.perf_counter()
        self._may_go.wait()
        self._stood_s += time.perf_counter() - began_s

    def _run(self) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        try:
            self._answer = self._step()
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is wanted
            self._error = error
        finally:
            self._stands.set()


CHANGES_NOTHING = ("rehearse", "save", "saved", "begin_step", "stands")
"""Commands during which a saving that has begun continues."""
Given = Mapping[str, Tensor]
"""The tensors of a command: a `TensorFile` or None."""


class Worker:
    """Executes commands.

    The ranks write the requested tensors that they hold into one file. Each rank reserves the same
    room for the others' tensors, so the first rank can list all tensors.
    """

    def __init__(self) -> None:
        self._ranks = Ranks(0, 1, torch.device("cpu"))
        self._made: RankEngine | StreamingRank | None = None
        self._state: EngineState | None = None
        self._forms: dict[str, Form] = {}
        self._parts: list[TensorFile] = []
        self._saving: command_history.PartSaving | None = None
        self._begun: SplitStep | None = None
        self._is_beside = False
        self._commands: dict[str, Callable[[exchange.Message, Given], exchange.Message]] = {
            "begin": self._begin,
            "make": self._make,
            "own": self._own,
            "count_from": self._count_from,
            "step": self._step,
            "begin_step": self._begin_step,
            "stands": self._stands,
            "finish_step": self._finish_step,
            "rehearse": self._rehearse,
            "write": self._write,
            "write_part": self._write_part,
            "write_moments": self._write_moments,
            "part": self._part,
            "load": self._load,
            "save": self._save,
            "saved": self._saved,
            "evaluate": self._evaluate,
        }
        self._questions: dict[str, Callable[[exchange.Message, TensorFile], None]] = {
            "read": self._read,
            "read_part": self._read_part,
            "read_moments": self._read_moments,
            "read_state": self._read_state,
        }

    def answer(self, message: exchange.Message, file: OpenFile | None) -> exchange.Message:
        """Executes a command; a failure becomes an answer too."""
        command = message.pop("do")
        try:
            if command in self._questions:
                assert file is not None
                out = exchange.Answer(file)
                self._questions[command](message, out)
                return {"tensors": exchange.listed(out), "mine": out.mine}
            if command == "state":
                return self._describe()
            if command not in CHANGES_NOTHING:
                if self._begun is not None:
                    self._begun.wait()
                self._state = None
                self._give_up_saving()
            given = exchange.opened(file, message.pop("tensors")) if file is not None else {}
            return self._commands[command](message, given)
        except SwarmError as error:
            reason = getattr(error, "reason", "")
            kind, text = type(error).__name__, error.args[0]
            return {"failed": kind, "text": text, "hint": error.hint, "reason": reason}
        except Disconnected as error:
            return {"failed": "disconnected", "text": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever it is, the controller says it
            if lacks_memory(error):
                text = str(error).partition("\n")[0] or type(error).__name__
                return {"failed": "memory", "text": text}
            return {"failed": "fault", "text": traceback.format_exc()}

    # ------------------------------------------------ the start

    def _begin(self, message: exchange.Message, _: Given) -> exchange.Message:
        """Finds the other ranks."""
        rank, size = message["rank"], message["size"]
        backend, on_gpu = message["backend"], message["device"] == "cuda"
        torch.set_num_threads(message["threads"])
        if on_gpu:
            torch.cuda.set_device(message["local"] % torch.cuda.device_count())
        self._ranks = Ranks(rank, size, torch.device("cuda" if backend == "nccl" else "cpu"))
        if size > 1:
            dist.init_process_group(
                backend,
                **_meeting(message["meeting"]),
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=COLLECTIVE_S),
            )
        return {"pid": os.getpid()}

    def _make(self, message: exchange.Message, _: Given) -> exchange.Message:
        if self._made is not None:
            self._made.close()
        self._made = None  # before the next one takes memory
        run = RunConfig.model_validate_json(message["run"])
        options = exchange.options_of(message["options"])
        self._made = rank_engine(run, options, self._ranks)
        self._is_beside = options.is_read_beside(run)
        return {}

    @property
    def _engine(self) -> RankEngine | StreamingRank:
        assert self._made is not None, "the first command makes an engine"
        return self._made

    # ------------------------------------------------ as `Engine`

    def _own(self, message: exchange.Message, _: Given) -> exchange.Message:
        self._engine.own(message["experts"])
        return {}

    def _count_from(self, message: exchange.Message, _: Given) -> exchange.Message:
        self._engine.count_from(message["updates"])
        return {}

    def _step(self, message: exchange.Message, given: Given) -> exchange.Message:
        return step_of(self._engine, self._ranks, message, given)()

    def _begin_step(self, message: exchange.Message, given: Given) -> exchange.Message:
        """Answers at once. Other questions are answered during the step; see `SplitStep`."""
        step = step_of(self._engine, self._ranks, message, given)
        self._begun = SplitStep(self._engine, step, is_beside=self._is_beside)
        return {}

    def _stands(self, _: exchange.Message, __: Given) -> exchange.Message:
        assert self._begun is not None, "a step was begun"
        return {"stands": self._begun.stands}

    def _finish_step(self, _: exchange.Message, __: Given) -> exchange.Message:
        begun, self._begun = self._begun, None
        assert begun is not None, "a step was begun"
        return begun.finish()

    def _rehearse(self, _: exchange.Message, given: Given) -> exchange.Message:
        self._engine.rehearse(given["tokens"])
        return {}

    def _write(self, _: exchange.Message, given: Given) -> exchange.Message:
        for name in given:
            # Only the ranks that hold the tensor look it up.
            self._engine.write(command_history.Found({name: given.__getitem__}))
        return {}

    def _write_part(self, message: exchange.Message, given: Given) -> exchange.Message:
        self._engine.write_part(Slice(*message["part"]), given["values"])
        return {}

    def _write_moments(self, _: exchange.Message, given: Given) -> exchange.Message:
        self._engine.write_moments(dict(given))
        return {}

    def _part(self, _: exchange.Message, given: Given) -> exchange.Message:
        assert isinstance(given, TensorFile)
        self._parts.append(given)
        return {}

    def _load(self, message: exchange.Message, given: Given) -> exchange.Message:
        """Loads the state from this file and a given number of earlier ones."""
        assert isinstance(given, TensorFile)
        before, self._parts = self._parts, []
        files = [*before[len(before) - message["parts"] :], given]
        self._engine.load_state_dict(exchange.state_of(message, JoinedFiles(files)))
        return {"skipped": self._engine.skipped}

    def _evaluate(self, _: exchange.Message, given: Given) -> exchange.Message:
        mean = self._engine.evaluate(
            given["tokens"],
            scored_BT=given.get("scored"),
            agreed=given.__getitem__ if given.keys() - {"tokens", "scored"} else None,
        )
        return {"mean": mean}

    def _describe(self) -> exchange.Message:
        """The private state without its tensors, which are kept for single look-ups."""
        self._state = state = self._begun.state if self._begun else self._engine.state_dict()
        self._forms = self._engine.state_forms()
        flags = command_history.flags_of(
            self._forms, command_history.held(state.tensors, self._forms)
        )
        if self._ranks.rank:
            return {"held": flags}
        forms = {
            n: [exchange.dtype_name(dtype), list(shape)]
            for n, (dtype, shape) in self._forms.items()
        }
        return {"held": flags, "forms": forms, **exchange.state_message(state)}

    def _save(self, message: exchange.Message, _: Given) -> exchange.Message:
        """Begins to write this rank's share of the tensors in background threads."""
        self._give_up_saving()
        if self._state is None:
            self._describe()
        assert self._state is not None
        flags = message["flags"].get(str(self._ranks.rank))
        names = command_history.flagged(self._forms, flags) if flags else []
        if not command_history.held(self._state.tensors, self._forms).issuperset(names):
            return {}  # for an earlier worker with other experts; `_saved` answers `unknown`
        tensors = {name: self._state.tensors[name] for name in names}
        path = Path(message["folder"]) / command_history.part_name(
            message["stem"], self._ranks.rank
        )
        self._saving = command_history.PartSaving(message["stem"], path, tensors)
        return {}

    def _saved(self, message: exchange.Message, _: Given) -> exchange.Message:
        if self._saving is None or self._saving.stem != message["stem"]:
            return {"is": "unknown"}  # to new workers, which know nothing of the saving
        return self._saving.answer()

    def _give_up_saving(self) -> None:
        if self._saving is not None:
            self._saving.give_up()
        self._saving = None

    # ------------------------------------------------ questions

    def _read(self, message: exchange.Message, out: TensorFile) -> None:
        for name in message["names"]:
            out.leave_room(name, torch.float32, self._engine.shape(name))
            if self._engine.takes_part(name):
                self._put(out, name, name, self._engine.read([name])[name])

    def _read_part(self, message: exchange.Message, out: TensorFile) -> None:
        part = Slice(*message["part"])
        out.leave_room("values", torch.float32, (part.stop - part.start,))
        if self._engine.takes_part(part.name):
            self._put(out, part.name, "values", self._engine.read_part(part))

    def _read_moments(self, message: exchange.Message, out: TensorFile) -> None:
        for name in message["names"]:
            for kind in self._engine.moments_of(name):
                out.leave_room(f"{kind}.{name}", torch.float32, self._engine.shape(name))
            if self._engine.takes_part(name):
                for stored, tensor in self._engine.read_moments([name]).items():
                    self._put(out, name, stored, tensor)

    def _read_state(self, message: exchange.Message, out: TensorFile) -> None:
        if self._state is None:
            self._describe()
        assert self._state is not None
        name = message["name"]
        out.leave_room(name, *self._forms[name])
        of = name.partition(".")[2]
        if self._engine.takes_part(of):
            self._put(out, of, name, self._engine.whole(of, self._state.tensors[name]))

    def _put(self, out: TensorFile, of: str, name: str, tensor: Tensor) -> None:
        """Writes a tensor's values into the answer, if this rank answers."""
        if self._engine.answers(of):
            out.put(name, tensor)


def rank_engine(run: RunConfig, options: EngineOptions, ranks: Ranks) -> RankEngine | StreamingRank:
    """The engine of one rank.

    Raises:
        Disconnected: another rank has ended.
    """
    if options.kind is EngineKind.STREAMING:
        return StreamingRank(run, options, ranks)
    if options.pp == 1:
        kind = ShardedEngine if options.shards > 1 else RankEngine
        return (HeadsEngine if options.tp > 1 else kind)(run, options, ranks)
    from swarm.train.parallel import pipeline  # torch's schedules take 1 s and 75 MB

    stage = pipeline.ShardedStageEngine if options.shards > 1 else pipeline.StageEngine
    return (pipeline.HeadsStageEngine if options.tp > 1 else stage)(run, options, ranks)


def _meeting(found: exchange.Message) -> dict[str, Any]:
    """The meeting point of ranks: a file, or the controller if some are on other machines."""
    if "file" in found:
        return {"init_method": f"file://{found['file']}"}
    return {"store": meeting_at(found["host"], found["port"])}


class _ToController(logging.Handler):
    """Passes log records of the first rank to the controller, between two answers."""

    def __init__(self, channel: exchange.Channel) -> None:
        super().__init__(logging.INFO)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        line = [record.levelno, record.name, record.getMessage()]
        self._channel.send({"log": line})


def serve(channel: exchange.Channel) -> None:
    """Answers messages forever. The process ends with the controller."""
    inbox: queue.SimpleQueue[tuple[exchange.Message, OpenFile | None]] = queue.SimpleQueue()
    SYSTEM.start(partial(_listen, channel, inbox), "swarm-listen")
    worker = Worker()
    while True:
        message, file = inbox.get()
        if message["do"] == "begin":
            # All ranks would log the same records, so only the first one does.
            mine = _ToController(channel) if message["rank"] == 0 else logging.NullHandler()
            logging.basicConfig(level=logging.INFO, handlers=[mine])
        channel.send(worker.answer(message, file))


def _listen(channel: exchange.Channel, inbox: queue.SimpleQueue[Any]) -> None:
    """Reads until the socket is closed, then ends the process at once.

    After a fault in the middle of a message, the next message cannot be found, so any fault ends
    the process. Only the main thread writes to the channel, so the traceback goes to the
    controller's standard error.
    """
    try:
        while True:
            while (found := channel.take()) is not None:
                inbox.put(found)
            channel.receive()
    except exchange.Closed:
        os._exit(0)
    except BaseException:  # noqa: BLE001 - whatever it is, nobody else can end this process
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    """Serves the controller that has started this process."""
    # A signal by Ctrl+C, or by a service to all of a peer's processes, is meant for the controller.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(exchange.Closed):
        serve(exchange.Channel(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
