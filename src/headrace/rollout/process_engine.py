"""The local engine in a process of its own, behind the same protocol.

The child loads the model from a folder, uses its own threads (one by default, waiting without spinning, so that a learner
in this process keeps its share of the cores), and talks plain data over a socket: length-prefixed JSON frames. Published
weights go through a safetensors file in shared memory. Whatever ends the child fails everything pending at once, with the
child's traceback; the child ends itself when this process goes away, however that happens.

Real time only: a child does not know a simulated clock.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from headrace.rollout.clock import is_simulated
from headrace.rollout.engine import Completion, EngineError, Request, UnknownVersion, Weights
from headrace.rollout.meters import EngineMeters
from headrace.rollout.plain_module import has_adapters, plain_copy

_LENGTH = struct.Struct("<Q")
_ERRORS: dict[str, type[EngineError]] = {"EngineError": EngineError, "UnknownVersion": UnknownVersion}


class ChildTraceback(Exception):
    """The cause of an error that happened in the engine's process; its text is the traceback there."""

    def __str__(self) -> str:
        return f"in the engine's process\n{self.args[0]}"


class ProcessEngine:
    """``model``: a Hugging Face folder, or a model that is written to one. ``options`` are those of ``LocalEngine``
    (not ``costs``). ``threads``: of the child. ``device`` and ``dtype`` as PyTorch names them (None: as the folder says).

    The engine belongs to the event loop that uses it first. ``path`` and ``refused_paths`` are known after the first answer.
    """

    weight_slots: int | None = None

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        *,
        threads: int = 1,
        device: str = "cpu",
        dtype: str | None = None,
        start_seconds: float = 300.0,
        **options: Any,
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self._scratch = Path(tempfile.mkdtemp(prefix="headrace-engine-", dir=_shared_memory()))
        self._start_seconds = start_seconds
        self._next = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._closed = False
        self.meters = EngineMeters()
        self.path: str | None = None
        self.refused_paths: dict[str, str] = {}
        try:
            self._start(model, threads, {"device": device, "dtype": dtype, "threads": threads, "options": _plain(options)})
        except BaseException:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise

    def _start(self, model: PreTrainedModel | str | Path, threads: int, settings: dict[str, Any]) -> None:
        if isinstance(model, str | Path):
            folder = Path(model)
            if not folder.is_dir():
                raise ValueError(f"the engine's model folder does not exist: {folder}")
        else:
            folder = self._scratch / "model"
            (plain_copy(model) if has_adapters(model) else model).save_pretrained(folder)
        self._socket, theirs = socket.socketpair()
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "passive",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-m", "headrace.rollout.process_worker", str(theirs.fileno()), str(os.getpid())]
        self._errors = (self._scratch / "stderr").open("w+b")
        with theirs:
            self._process = subprocess.Popen(
                [*command, json.dumps(settings | {"folder": str(folder)})],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env=environment,
                start_new_session=True,  # Ctrl-C is this process's affair, which closes the child in order
            )

    # --- the protocol ----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        number, answer = await self._send("generate", _message(request))
        try:
            token_ids, logprobs, versions, reason, meters = await answer
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None:
                self._write([self._new_number(), "cancel", number])
            raise
        self.meters = EngineMeters(**meters)
        return Completion(tuple(token_ids), tuple(logprobs), tuple(versions), reason)

    async def publish(self, version: int, weights: Weights) -> None:
        await self._connected()
        path = self._scratch / f"weights-{self._next}"
        try:
            await asyncio.to_thread(_save, weights, path)
            _, answer = await self._send("publish", [version, str(path)])
            await answer
        finally:
            path.unlink(missing_ok=True)

    async def end(self, dispatch: int) -> None:
        if self._closed or self._failure is not None:
            return
        _, answer = await self._send("end", dispatch)
        await answer

    async def close(self) -> None:
        """Fail what is pending and leave no process behind."""
        if self._closed:
            return
        self._closed = True
        if self._failure is None:
            self._fail(EngineError("the engine was closed while requests ran"))
        for task in (self._connecting, self._reading):
            if task is not None and not task.done():
                task.cancel()
        if self._writer is not None:
            self._writer.close()
        self._socket.close()  # the child ends when it reads the end of the stream
        await asyncio.to_thread(self._reap)

    # --- the connection --------------------------------------------------------------------------------------------

    async def _connected(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._failure is not None:
            raise EngineError(f"the engine has failed earlier: {self._failure}") from self._failure.__cause__
        if is_simulated():
            raise EngineError("an engine in its own process runs in real time only; use LocalEngine in simulated time")
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        elif self._connecting.get_loop() is not asyncio.get_running_loop():
            raise EngineError("the engine belongs to another event loop; make one for each")
        await asyncio.shield(self._connecting)

    async def _connect(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[-1] = ready
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))
        try:
            self.path, self.refused_paths = await asyncio.wait_for(ready, self._start_seconds)
        except TimeoutError:
            error = EngineError(f"the engine's process was not ready after {self._start_seconds:g} s{self._said()}")
            self._fail(error)
            raise error from None
        shutil.rmtree(self._scratch / "model", ignore_errors=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                number, kind, payload = json.loads(await reader.readexactly(length))
                if kind == "crash":
                    error = EngineError("the engine's process crashed")
                    error.__cause__ = ChildTraceback(payload)
                    self._fail(error)
                    return
                self._settle(number, kind, payload)
        except (asyncio.IncompleteReadError, OSError):
            self._fail(self._died())

    def _settle(self, number: int, kind: str, payload: Any) -> None:
        answer = self._waiting.pop(number, None)
        if answer is None or answer.done():
            return
        if kind == "ok":
            answer.set_result(payload)
            return
        name, message, traceback = payload
        error = _ERRORS.get(name, EngineError)(message)
        if traceback:
            error.__cause__ = ChildTraceback(traceback)
        answer.set_exception(error)

    async def _send(self, kind: str, payload: Any) -> tuple[int, asyncio.Future[Any]]:
        await self._connected()
        number = self._new_number()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._write([number, kind, payload])
        return number, answer

    def _write(self, frame: list[Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            data = json.dumps(frame, separators=(",", ":")).encode()
            self._writer.write(_LENGTH.pack(len(data)) + data)

    def _new_number(self) -> int:
        self._next += 1
        return self._next

    # --- failure and the end ---------------------------------------------------------------------------------------

    def _fail(self, error: EngineError) -> None:
        """Everything pending fails now, and everything later."""
        self._failure = error
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                own = type(error)(*error.args)
                own.__cause__ = error.__cause__
                answer.set_exception(own)

    def _died(self) -> EngineError:
        try:
            code = self._process.wait(timeout=2)
            how = f"by signal {-code}" if code < 0 else f"with status {code}"
        except subprocess.TimeoutExpired:
            how = "its connection, but still runs"
        return EngineError(f"the engine's process ended {how}{self._said()}")

    def _said(self) -> str:
        """The end of what the child wrote to its standard error."""
        self._errors.flush()
        path = Path(self._errors.name)
        text = path.read_text(errors="replace").strip()[-2000:] if path.exists() else ""
        return f"; it wrote:\n{text}" if text else ""

    def _reap(self) -> None:
        for signal in (None, "terminate", "kill"):
            if signal is not None:
                getattr(self._process, signal)()
            try:
                self._process.wait(timeout=5)
                break
            except subprocess.TimeoutExpired:
                continue
        self._errors.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _shared_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _message(request: Request) -> dict[str, Any]:
    """By name and as it is: ``asdict`` would copy a context token by token, ten times the cost of writing it."""
    return {field.name: getattr(request, field.name) for field in fields(request)}


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    if "costs" in options:
        raise ValueError("an engine in its own process runs in real time only: it takes no costs")
    return {name: list(value) if isinstance(value, Iterable) and not isinstance(value, str) else value for name, value in options.items()}


def _save(weights: Weights, path: Path) -> None:
    """One copy of every storage: tied weights are written under their first name."""
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    distinct: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if seen.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name) == name:
            distinct[name] = tensor.detach().cpu().contiguous()
    save_file(distinct, path)
