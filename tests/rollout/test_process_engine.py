import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from headrace.rollout.clock import run
from headrace.rollout.engine import Engine, EngineError, Request, UnknownVersion
from headrace.rollout.local_engine import LocalEngine
from headrace.rollout.process_engine import ChildTraceback, ProcessEngine

OPTIONS: dict[str, Any] = {"stop_token_ids": [3], "slots": 4, "context_limit": 500}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).train(False)


def request(dispatch: int = 0, **fields: Any) -> Request:
    defaults: dict[str, Any] = {"turn": 0, "token_ids": (5, 6, 7), "version": 0, "max_tokens": 8, "seed": 1}
    return Request(dispatch=dispatch, **(defaults | fields))


def go(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), 120))


def alive(pid: int) -> bool:
    """Running, and not merely waiting to be collected by a parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


def test_it_answers_as_the_local_engine_does_and_leaves_nothing_behind(model: PreTrainedModel) -> None:
    engine, local = ProcessEngine(model, **OPTIONS), LocalEngine(model, **OPTIONS)
    assert isinstance(engine, Engine)
    pid, scratch = engine._process.pid, engine._scratch
    newer = {name: tensor * 1.5 for name, tensor in model.state_dict().items()}

    async def main() -> None:
        for dispatch in range(3):
            theirs, ours = await engine.generate(request(dispatch)), await local.generate(request(dispatch))
            assert theirs.token_ids == ours.token_ids
            assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-5)
            assert (theirs.versions, theirs.stop_reason) == (ours.versions, ours.stop_reason)
        assert engine.path == local.path
        assert engine.meters.sampled_tokens == local.meters.sampled_tokens
        for either in (engine, local):
            await either.publish(1, newer)
            await either.end(0)
        theirs, ours = await engine.generate(request(9, version=1)), await local.generate(request(9, version=1))
        assert theirs.token_ids == ours.token_ids
        with pytest.raises(UnknownVersion, match="snapshot 5"):
            await engine.generate(request(10, version=5))
        with pytest.raises(EngineError, match="versions only grow"):
            await engine.publish(0, newer)
        withdrawn = asyncio.create_task(engine.generate(request(11, max_tokens=450)))
        await asyncio.sleep(0.01)
        withdrawn.cancel()
        await asyncio.gather(withdrawn, return_exceptions=True)
        assert (await engine.generate(request(11))).token_ids  # the dispatch is free again
        os.kill(pid, signal.SIGSTOP)  # so that both frames are there when it reads
        both = asyncio.gather(engine.generate(request(12, max_tokens=450)), engine.end(12), return_exceptions=True)
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGCONT)
        running, _ = await both
        assert "dispatch 12 was ended" in str(running)
        running, _ = await asyncio.gather(engine.generate(request(13, max_tokens=450)), engine.close(), return_exceptions=True)
        assert isinstance(running, EngineError)
        assert "closed" in str(running)
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request(14))

    go(main)
    assert not alive(pid)
    assert not scratch.exists()


def test_a_killed_child_fails_everything_within_a_second(model: PreTrainedModel) -> None:
    engine = ProcessEngine(model, **OPTIONS)

    async def main() -> None:
        await engine.generate(request())
        os.kill(engine._process.pid, signal.SIGSTOP)  # so that nothing is answered before it dies
        running = [asyncio.create_task(engine.generate(request(dispatch))) for dispatch in range(1, 4)]
        await asyncio.sleep(0.05)
        killed = time.monotonic()
        os.kill(engine._process.pid, signal.SIGKILL)
        results = await asyncio.gather(*running, return_exceptions=True)
        assert time.monotonic() - killed < 1.0
        for result in results:
            assert isinstance(result, EngineError)
            assert "signal 9" in str(result)
        with pytest.raises(EngineError, match="failed earlier"):
            await engine.generate(request(9))
        await engine.end(1)
        await engine.close()

    go(main)


def test_a_child_that_cannot_start_says_why_with_its_traceback(tmp_path: Path) -> None:
    engine = ProcessEngine(tmp_path, **OPTIONS)

    async def main() -> None:
        with pytest.raises(EngineError, match="crashed") as raised:
            await engine.generate(request())
        assert isinstance(raised.value.__cause__, ChildTraceback)
        assert "from_pretrained" in str(raised.value.__cause__)
        await engine.close()

    go(main)
    assert not alive(engine._process.pid)


def test_bad_arguments_are_refused_before_a_process_starts(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        ProcessEngine(tmp_path / "nowhere", **OPTIONS)
    with pytest.raises(ValueError, match="threads"):
        ProcessEngine(model, threads=0, **OPTIONS)
    with pytest.raises(ValueError, match="no costs"):
        ProcessEngine(model, costs=None, **OPTIONS)


def test_simulated_time_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    engine = ProcessEngine(tmp_path, **OPTIONS)

    async def main() -> None:
        with pytest.raises(EngineError, match="real time only"):
            await engine.generate(request())

    run(main(), simulated=True)
    asyncio.run(engine.close())


def test_the_child_ends_when_its_parent_is_killed(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    program = textwrap.dedent(
        f"""
        import asyncio, time
        from headrace.rollout.engine import Request
        from headrace.rollout.process_engine import ProcessEngine
        engine = ProcessEngine({str(tmp_path)!r}, stop_token_ids=[3], slots=2, context_limit=100)
        print(engine._process.pid, flush=True)
        time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until_gone(child)
