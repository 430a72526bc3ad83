"""The engine's own process: ``python -m headrace.rollout.process_worker SOCKET PARENT SETTINGS``, started by ``ProcessEngine``."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import threading
import time
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct("<Q")


def main(descriptor: int, parent: int, settings: dict[str, Any]) -> None:
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    connection = socket.socket(fileno=descriptor)
    try:
        engine = _load(settings)
        asyncio.run(_Server(engine).serve(connection))
    except Exception:
        data = _frame([-1, "crash", traceback.format_exc()])
        connection.setblocking(True)
        connection.sendall(data)
        raise


def _end_with_parent(parent: int) -> None:
    """A parent that was killed cannot say so; its children get another one."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _load(settings: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from headrace.rollout.local_engine import LocalEngine

    torch.set_num_threads(settings["threads"])
    dtype = "auto" if settings["dtype"] is None else getattr(torch, settings["dtype"])
    model = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=dtype)
    return LocalEngine(model.to(settings["device"]), **settings["options"])


def _frame(content: list[Any]) -> bytes:
    data = json.dumps(content, separators=(",", ":")).encode()
    return _LENGTH.pack(len(data)) + data


class _Server:
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, connection: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._writer.write(_frame([-1, "ok", [self._engine.path, self._engine.refused_paths]]))
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                number, kind, payload = json.loads(await reader.readexactly(length))
                if kind == "cancel":
                    if (task := self._tasks.get(payload)) is not None:
                        task.cancel()
                    continue
                task = asyncio.get_running_loop().create_task(self._answer(number, kind, payload))
                self._tasks[number] = task
                task.add_done_callback(partial(self._forget, number))
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)  # the parent closed the engine or is gone: nothing here is worth keeping

    def _forget(self, number: int, _: asyncio.Task[None]) -> None:
        del self._tasks[number]

    async def _answer(self, number: int, kind: str, payload: Any) -> None:
        try:
            result = await getattr(self, f"_{kind}")(payload)
        except Exception as error:
            cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ is not None else ""
            self._writer.write(_frame([number, "error", [type(error).__name__, str(error), cause]]))
        else:
            self._writer.write(_frame([number, "ok", result]))

    async def _generate(self, payload: dict[str, Any]) -> list[Any]:
        from headrace.rollout.engine import Request

        done = await self._engine.generate(Request(**(payload | {"token_ids": tuple(payload["token_ids"])})))
        return [done.token_ids, done.logprobs, done.versions, done.stop_reason, asdict(self._engine.meters)]

    async def _publish(self, payload: list[Any]) -> None:
        from safetensors.torch import load_file

        version, path = payload
        await self._engine.publish(version, load_file(Path(path)))

    async def _end(self, dispatch: int) -> None:
        await self._engine.end(dispatch)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
