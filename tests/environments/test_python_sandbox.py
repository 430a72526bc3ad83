"""The Python tool: what it shows, what it keeps, and what attacks on it come to."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.environments import _last_expression, bubblewrap, python_sandbox
from headrace.environments.python_sandbox import PythonSandbox, SandboxUnavailable
from headrace.environments.sandbox_results import short_traceback, shorten

pytest.importorskip("pydantic_monty")


def jail_reason() -> str | None:
    try:
        bubblewrap.require_bubblewrap()
    except SandboxUnavailable as error:
        return str(error)
    return None


JAIL_REASON = jail_reason()
needs_jail = pytest.mark.skipif(JAIL_REASON is not None, reason=str(JAIL_REASON))
BACKENDS = ["monty", pytest.param("cpython", marks=needs_jail)]


@pytest.fixture(params=BACKENDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[PythonSandbox]:
    with PythonSandbox(request.param, seconds=0.5) as made:
        yield made


def children() -> dict[int, tuple[str, float]]:
    """Live descendants of this process: name and processor seconds by id."""
    found: dict[int, tuple[str, float]] = {}
    parents, facts = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            fields = rest.split()
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
                facts[int(entry.name)] = (name, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid() and pid != os.getpid():
            found[pid] = facts[pid]
    return found


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


# --- what it shows and keeps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2"),
        ("print('hi')\n2 * 3", "hi\n6"),
        ("x = 3", ""),
        ("'text'", "'text'"),
        ("None", ""),
        ("5; 6", "6"),
        ("(1,\n 2)  # both", "(1, 2)"),
        ("1 == 1", "True"),
        ("f = lambda a: a + 1\nf(2)", "3"),
        ("if True:\n    5", ""),
        ("for i in range(2):\n    print(i)", "0\n1"),
        ("class A:\n    def __repr__(self):\n        return 'an A'\nA()", "an A"),
        ("", ""),
        ("# only a comment", ""),
        ("repr = str = 5\n'a'", "'a'"),
        ("import math\nmath.comb(10, 3)", "120"),
    ],
)
def test_the_last_expression_is_shown_as_in_a_notebook(sandbox: PythonSandbox, code: str, output: str) -> None:
    result = sandbox.run(code)
    assert (result.output, result.error, result.limit) == (output, None, None)


def test_variables_and_functions_last_until_the_reset(sandbox: PythonSandbox) -> None:
    assert sandbox.run("x = 20\ndef double(n):\n    return 2 * n").text == ""
    assert sandbox.run("double(x) + 2").output == "42"
    assert sandbox.run("_").output == "42"
    sandbox.reset()
    assert sandbox.run("x").error == "line 1: x\nNameError: name 'x' is not defined"


def test_two_sandboxes_do_not_share_variables(sandbox: PythonSandbox) -> None:
    sandbox.run("x = 1")
    with PythonSandbox(seconds=1.0) as other:
        assert "NameError" in str(other.run("x").error)


def test_an_exception_is_a_short_traceback_and_keeps_what_happened_before_it(sandbox: PythonSandbox) -> None:
    result = sandbox.run("y = 5\nprint('before')\ndef g(a):\n    return a / 0\ng(y)")
    assert result.output == "before"
    assert result.error == "line 5: g(y)\nline 4 in g: return a / 0\nZeroDivisionError: division by zero"
    assert result.text == "before\n" + result.error
    assert sandbox.run("y").output == "5"
    assert sandbox.run("g(1)").error == "line 1: g(1)\nline 4 in g\nZeroDivisionError: division by zero"


NO_PYTHON = ["for", "x = (", "'open", "x\x00y", "\ud800", "def f(:\n 1", "@", "\\", "yield", "1" * 30_000, "(" * 5_000, "-" * 9_000 + "1"]


@pytest.mark.parametrize("code", NO_PYTHON)
def test_code_that_is_no_python_is_a_normal_result(sandbox: PythonSandbox, code: str) -> None:
    result = sandbox.run(code)
    assert result.error is not None and len(result.error) <= 700
    assert sandbox.run("1").output == "1"


def test_long_output_and_errors_are_cut_in_the_middle(sandbox: PythonSandbox) -> None:
    for code in ("print('a' * 5000)", "'a' * 5000", "print('a' * 1500)\n'b' * 1500"):
        result = sandbox.run(code)
        assert len(result.output) <= 2_000 and "characters left out" in result.output
    error = sandbox.run("raise ValueError('x' * 100000)").error
    assert error is not None and len(error) <= 600 and error.startswith("line 1: raise ValueError")


def test_random_numbers_are_the_same_in_every_run() -> None:
    def draw() -> str:
        with PythonSandbox(seed=7) as sandbox:
            return sandbox.run("import random\nrandom.random()").output + sandbox.run("random.randint(1, 10**9)").output

    assert draw() == draw()


def test_an_unknown_backend_and_limits_of_zero_are_refused() -> None:
    with pytest.raises(ValueError, match='"monty" or "cpython", not in \'docker\''):
        PythonSandbox("docker")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seconds must be above 0"):
        PythonSandbox(seconds=0)


# --- attacks ----------------------------------------------------------------------------------------------------------------

ENDLESS = ["while True: pass", "while True:\n    try:\n        while True: pass\n    except BaseException: pass", "sum(range(10 ** 13))"]
MEMORY = ["'a' * 10 ** 12", "[0] * 10 ** 11", "x = 'a'\nwhile True: x += x", "10 ** 10 ** 10", "list(range(10 ** 11))"]
FLOODS = ["while True: print('y' * 1000)", "for i in range(10 ** 9): print(i)"]
RECURSION = ["def f(n):\n    return f(n + 1)\nf(0)", "f = lambda: f()\nf()",
             "x = []\nx.append(x)\nstr(x) and len(x)\nf = lambda n: [f(n)]\nf(1)"]  # fmt: skip
FORKS = ["import os\nos.fork()", "import subprocess\nsubprocess.run(['true'])", "import threading\nthreading.Thread(target=print).start()",
         "import multiprocessing\nmultiprocessing.Process(target=print).start()"]  # fmt: skip
FILES = ["open('/etc/passwd').read()", "open('/root/.bashrc').read()", "open('/written', 'w')", "open('/usr/written', 'w')",
         "import os\nos.remove('/usr/bin/env')", "import pathlib\npathlib.Path('/etc/shadow').read_text()"]  # fmt: skip
NETWORK = [
    "import socket\nsocket.create_connection(('127.0.0.1', 80), 1)",
    "import urllib.request\nurllib.request.urlopen('http://127.0.0.1')",
]


@pytest.mark.parametrize("code", ENDLESS)
def test_endless_work_is_stopped_and_the_next_call_works(sandbox: PythonSandbox, code: str) -> None:
    started = time.monotonic()
    result = sandbox.run(code)
    assert result.limit == "time" and "stopped after 0.5 s" in str(result.error)
    assert time.monotonic() - started < 8
    assert sandbox.run("1 + 1").output == "2"


@pytest.mark.parametrize("code", MEMORY)
def test_memory_beyond_the_limit_is_refused(sandbox: PythonSandbox, code: str) -> None:
    before = resident_mb()
    result = sandbox.run(code)
    assert result.limit in ("memory", "time") or "Error" in str(result.error)
    assert resident_mb() - before < 50
    assert sandbox.run("1 + 1").output == "2"


@pytest.mark.parametrize("code", FLOODS)
def test_a_flood_of_output_is_stopped_and_never_reaches_this_process(sandbox: PythonSandbox, code: str) -> None:
    before = resident_mb()
    result = sandbox.run(code)
    assert result.limit in ("output", "time") and len(result.output) <= 2_000
    assert resident_mb() - before < 50
    assert sandbox.run("1 + 1").output == "2"


@pytest.mark.parametrize("code", RECURSION)
def test_deep_recursion_is_a_normal_error(sandbox: PythonSandbox, code: str) -> None:
    assert "RecursionError" in str(sandbox.run(code).error)
    assert sandbox.run("1 + 1").output == "2"


@pytest.mark.parametrize("code", FORKS + FILES + NETWORK)
def test_processes_files_and_network_are_out_of_reach(sandbox: PythonSandbox, code: str) -> None:
    before = set(children())
    result = sandbox.run(code)
    assert result.error is not None and result.limit is None
    assert len(set(children()) - before) <= 3  # a worker, or a jail's three processes
    assert sandbox.run("1 + 1").output == "2"


def test_a_value_of_exponential_size_never_reaches_this_process(sandbox: PythonSandbox) -> None:
    before = resident_mb()
    result = sandbox.run("q = [0]\nfor i in range(60):\n    q = [q, q]\nq")
    assert result.limit in ("time", "memory")
    assert resident_mb() - before < 50
    assert sandbox.run("1 + 1").output == "2"


def test_the_environment_of_this_process_is_not_visible(sandbox: PythonSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TEST_SECRET", "hunter2")
    for code in (
        "import os\nprint(dict(os.environ))",
        "import os\nprint(os.getenv('HEADRACE_TEST_SECRET'))",
        "print(open('/proc/self/environ').read())",
        "print(open('/proc/1/environ').read())",
        f"print(open('/proc/{os.getpid()}/environ').read())",
    ):
        assert "hunter2" not in sandbox.run(code).text


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_timeout_the_work_is_gone_and_memory_is_flat(backend: str) -> None:
    """An allocating endless loop, stopped: no process goes on working, and the process that held the heap is no more."""
    others = set(children())
    with PythonSandbox(backend, seconds=0.5, workers=2) as sandbox:  # type: ignore[arg-type]
        sandbox.run("1")
        before = resident_mb()
        for _ in range(3):
            assert sandbox.run("while True:\n    kept = ['a' * 1000 for _ in range(5000)]").limit == "time"
        used = {pid: seconds for pid, (_, seconds) in children().items() if pid not in others}
        time.sleep(0.5)
        now = {pid: seconds for pid, (_, seconds) in children().items() if pid not in others}
        assert all(seconds - used.get(pid, seconds) < 0.1 for pid, seconds in now.items())
        assert resident_mb() - before < 20
    left = {name for pid, (name, _) in children().items() if pid not in others}
    assert left <= {"monty"}  # idle workers may wait for the next call


def test_a_call_that_breaks_a_limit_is_undone_in_the_default_sandbox() -> None:
    with PythonSandbox(seconds=0.3) as sandbox:
        sandbox.run("x = 1")
        for code in ("x = 2\nwhile True: pass", "x = 2\n'a' * 10 ** 12", "x = 2\nwhile True: print('y' * 10000)"):
            assert "Variables are as before this call." in str(sandbox.run(code).error)
        assert sandbox.run("x").output == "1"


def test_variables_that_are_too_large_to_keep_are_refused() -> None:
    with PythonSandbox(state_mb=1) as sandbox:
        sandbox.run("x = 1")
        result = sandbox.run("x = 'a' * 3_000_000")
        assert result.limit == "state" and "more than 1 MB" in str(result.error)
        assert sandbox.run("x").output == "1"


def test_a_worker_killed_in_the_middle_of_a_call_is_a_normal_result() -> None:
    with PythonSandbox(seconds=5.0, workers=1) as sandbox:
        sandbox.run("x = 1")
        busy: list[int] = []

        def kill_the_busy_one() -> None:
            while not busy:
                first = children()
                time.sleep(0.2)
                workers = {pid: seconds for pid, (name, seconds) in children().items() if name == "monty"}
                busy.extend(pid for pid, seconds in workers.items() if pid in first and seconds - first[pid][1] > 0.05)
            os.kill(busy[0], signal.SIGKILL)

        killer = threading.Thread(target=kill_the_busy_one, daemon=True)
        killer.start()
        result = sandbox.run("while True: pass")
        killer.join(10)
        assert result.limit == "crash" and "died" in str(result.error)
        assert sandbox.run("x").output == "1"


def test_a_thousand_calls_at_once_finish_and_cost_the_event_loop_almost_nothing() -> None:
    async def episode(number: int) -> str:
        sandbox = PythonSandbox(seconds=1.0, workers=2)
        if number % 250 == 0:
            return str((await sandbox.run_async("while True: pass")).limit)
        await sandbox.run_async(f"x = {number}")
        return (await sandbox.run_async("x * 2")).output

    async def all_of_them() -> tuple[list[str], float]:
        started = time.thread_time()
        results = await asyncio.gather(*(episode(number) for number in range(1000)))
        return results, time.thread_time() - started

    results, loop_seconds = asyncio.run(all_of_them())
    assert results == ["time" if number % 250 == 0 else str(number * 2) for number in range(1000)]
    assert loop_seconds < 2.0  # of this thread, for 1,996 calls
    assert sum(name == "monty" for name, _ in children().values()) <= 12  # a few workers of each pool of this test run


def test_calls_from_many_threads_do_not_mix() -> None:
    def episode(number: int) -> str:
        with PythonSandbox(seconds=2.0) as sandbox:
            sandbox.run(f"x = {number}")
            return sandbox.run("x").output

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(episode, range(64))) == [str(number) for number in range(64)]


def test_a_call_still_waiting_at_the_reset_does_not_touch_the_next_episode() -> None:
    async def scenario() -> str:
        sandbox = PythonSandbox(seconds=0.5, workers=1)
        blockers = [asyncio.create_task(PythonSandbox(seconds=0.5, workers=1).run_async("while True: pass")) for _ in range(2)]
        await asyncio.sleep(0.05)
        late = asyncio.create_task(sandbox.run_async("x = 'late'"))
        await asyncio.sleep(0.05)
        sandbox.reset()
        await asyncio.gather(late, *blockers)
        return (await sandbox.run_async("x")).text

    assert "NameError" in asyncio.run(scenario())


def test_a_call_that_waited_too_long_is_refused_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_sandbox, "QUEUE_SECONDS", 0.1)

    async def scenario() -> list[str | None]:
        boxes = [PythonSandbox(seconds=0.4, workers=1) for _ in range(3)]
        results = await asyncio.gather(*(box.run_async("while True: pass") for box in boxes))
        return [result.limit for result in results]

    limits = asyncio.run(scenario())
    assert limits[0] == "time" and "busy" in limits


# --- the jail --------------------------------------------------------------------------------------------------------------------


@needs_jail
def test_the_jail_has_the_full_library() -> None:
    with PythonSandbox("cpython") as sandbox:
        assert sandbox.run("from fractions import Fraction\nFraction(1, 3) + Fraction(1, 6)").output == "Fraction(1, 2)"
        assert sandbox.run("from math import *\npow(2, 0.5) > 1").output == "True"
        pytest.importorskip("sympy")
        assert sandbox.run("import sympy\nx = sympy.Symbol('x')\nsympy.factor(x**2 - 1)").output == "(x - 1)*(x + 1)"


@needs_jail
@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("import os\nos._exit(1)", "crash"),
        ("import ctypes\nctypes.string_at(0)", "crash"),
        ("import os\nos.kill(os.getpid(), 9)", "crash"),
        ("import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass", "time"),
    ],
)
def test_a_jail_that_dies_or_must_be_killed_is_replaced(code: str, limit: str) -> None:
    with PythonSandbox("cpython", seconds=0.5) as sandbox:
        sandbox.run("x = 1")
        result = sandbox.run(code)
        assert result.limit == limit and "All variables are lost." in str(result.error)
        assert "NameError" in str(sandbox.run("x").error)


@needs_jail
@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.kill(-1, 9)",
        "import os\n[os.write(f, b'garbage\\n') for f in range(3, 30) if os.path.exists(f'/proc/self/fd/{f}') and f != 3]",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "import ctypes\nctypes.CDLL(None).prctl(22, 0, 0)",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n):\n    return f(n + 1)\nf(0)",
        "for i in range(100):\n    open(f'/tmp/{i}', 'wb').write(b'x' * 10**7)",
        "files = [open('/tmp/y', 'w') for _ in range(1000)]",
        "import os\nos.memfd_create('x')",
        "import sys\nsys.exit(3)",
        "input()",
    ],
)
def test_nothing_in_the_jail_reaches_outside_it(code: str) -> None:
    with PythonSandbox("cpython", seconds=1.0) as sandbox:
        sandbox.run(code)
        sandbox.run("1")
        assert sandbox.run("1 + 1").output == "2"


@needs_jail
def test_a_jail_lives_on_when_the_thread_that_used_it_ends_and_dies_whole_when_closed() -> None:
    sandbox = PythonSandbox("cpython")
    thread = threading.Thread(target=lambda: sandbox.run("x = 5"))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert sandbox.run("x").output == "5"
    assert any(name == "bwrap" for name, _ in children().values())
    sandbox.close()
    assert not any(name == "bwrap" for name, _ in children().values())
    assert sandbox.run("1").limit == "crash"  # closed


@needs_jail
def test_closing_a_jail_ends_a_call_in_progress() -> None:
    sandbox = PythonSandbox("cpython", seconds=20.0)
    sandbox.run("1")
    threading.Timer(0.3, sandbox.close).start()
    started = time.monotonic()
    assert sandbox.run("while True: pass").limit == "crash"
    assert time.monotonic() - started < 10


def test_without_bubblewrap_the_jail_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    bubblewrap.require_bubblewrap.cache_clear()
    with pytest.raises(SandboxUnavailable, match="install the package bubblewrap"):
        PythonSandbox("cpython")
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: "/bin/false")
    bubblewrap.require_bubblewrap.cache_clear()
    with pytest.raises(SandboxUnavailable, match="permission for user namespaces"):
        PythonSandbox("cpython")
    bubblewrap.require_bubblewrap.cache_clear()


def test_neither_the_tool_nor_the_grader_keeps_the_process_from_ending() -> None:
    script = """
import asyncio, threading
from headrace.environments.grading import equivalent_async
from headrace.environments.python_sandbox import PythonSandbox

async def main():
    sandbox = PythonSandbox(seconds=30.0)
    print((await sandbox.run_async("1 + 1")).output, await equivalent_async("1/2", "0.5"))
    asyncio.ensure_future(sandbox.run_async("while True: pass"))
    await asyncio.sleep(0.2)

asyncio.run(main())
print([thread.name for thread in threading.enumerate() if not thread.daemon])
"""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2 True\n['MainThread']\n", done.stderr
    assert time.monotonic() - started < 25


# --- small parts --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("1 + 1", "_ = (1 + 1)\nSHOW"),
        ("a = 1\nf(a)  # c", "a = 1\n_ = (f(a))  # c\nSHOW"),
        ("a; b", "a; _ = (b)\nSHOW"),
        ("f(\n  1,\n)", "_ = (f(\n  1,\n))\nSHOW"),
        ("lambda x: x", "_ = (lambda x: x)\nSHOW"),
        ("a[1:2]", "_ = (a[1:2])\nSHOW"),
        ("a == b", "_ = (a == b)\nSHOW"),
        ("not a", "_ = (not a)\nSHOW"),
    ],
)
def test_a_last_expression_is_bound_and_shown(code: str, shown: str) -> None:
    assert _last_expression.show_last_expression(code, "_", "SHOW") == shown


NO_EXPRESSION = ["a = 1", "a += 1", "a: int = 1", "a: int", "if a:\n  b", "import a", "def f(): 1", "for", "(", "'", "type X = int"]


@pytest.mark.parametrize("code", [*NO_EXPRESSION, "", "x\n y", "del a", "match a:\n  case 1: b"])
def test_what_is_no_expression_runs_unchanged(code: str) -> None:
    assert _last_expression.show_last_expression(code, "_", "SHOW") == code + "\nNone"


def test_shortening_keeps_both_ends_and_says_what_is_missing() -> None:
    assert shorten("short", 10) == "short"
    cut = shorten("a" * 500 + "b" * 500, 200)
    assert len(cut) <= 200 and cut.startswith("aaaa") and cut.endswith("bbbb") and "[800 characters left out]" in cut


def test_a_traceback_names_the_innermost_frames_only() -> None:
    frames = [(1, "<module>", True)] + [(2, "f", True)] * 9
    assert short_traceback(frames, "E: x", "f(1)\nf(2)") == "... 7 more\n" + "line 2 in f: f(2)\n" * 3 + "E: x"
