"""A few threads on which waiting may block, and which never keep the process from ending.

``ThreadPoolExecutor``'s threads are joined when the interpreter ends; a tool call or a comparison that is still running
then is of no use to anyone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class DaemonThreads(Executor):
    """At most ``count`` daemon threads, started when they are needed; calls run in the order in which they were submitted."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._busy = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._busy += 1
            if self._busy > self._started and self._started < self._count:
                self._started += 1
                threading.Thread(target=self._serve, name=f"{self._name}_{self._started}", daemon=True).start()
        self._calls.put((future, lambda: fn(*args, **kwargs)))
        return future

    def _serve(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del future, call
            with self._lock:
                self._busy -= 1
