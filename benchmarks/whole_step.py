"""A whole training step, samples to new weights, against TRL's ``GRPOTrainer``: samples per second and peak memory.

    python benchmarks/whole_step.py [--smollm2] [--dtype float32|bfloat16] [--samples N] [--steps N] [--repeats N] [--json FILE]

Both train the same folder on the same task (``sums.py``): the tiny policy of about 0.8 million parameters, or with ``--smollm2``
SmolLM2-135M-Instruct. It is warm-started on the task first (kept in Headrace's cache), so that replies have the task's form, end by
themselves, are all about equally long (padding costs TRL nothing) and earn rewards with a spread. Each trainer runs in a process
of its own, one after another, the order turning with every repeat; one thread each.

The same on both sides: prompts to the token, groups of 8, samples and one optimizer step per step (so everything is on-policy), the GRPO
loss without KL, AdamW, learning rate 1e-6, temperature 1 over the full vocabulary, no gradient checkpointing, and ``--rows``, how
many samples go through one forward and backward pass. Neither writes a checkpoint within what is timed; Headrace writes its log.

- *headrace*: ``headrace.train`` with recipe grpo, ``max_staleness`` 0, everything in one process: generate, then train, as TRL does.
- *headrace stream*: recipe spo++ with the engine in a process (and on a thread) of its own, samples of the next step while this one
  trains; as many single attempts a step in place of groups. Time and memory are those of both processes together.
- *trl*: transformers' ``generate`` under ``GRPOTrainer``.
- bfloat16: *headrace* has bfloat16 parameters with float32 masters and Adam states, *trl* what it does with a bfloat16 folder
  (``bf16=True``: bfloat16 parameters and Adam states, autocast), *trl autocast* float32 parameters and Adam states, bfloat16 arithmetic.

Counted: samples over the time of all steps but the first (wall time, and CPU time of all processes and threads); the memory peak
(``VmHWM``) up to the last of these steps; and, to see what a trainer adds, resident memory after the imports and after the model was
loaded. *Generating*: the share of wall time before the last sample is there (in *stream*, the share that the learner waits).
Ratios are ours over theirs in the same repeat; medians over repeats with the spread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spread import Spread
from whole_step_sides import GROUP, SIDES, WORLD, Measured, Setting, run_side

WARM_STARTS: dict[bool, dict[str, Any]] = {
    False: {
        "policy": {"model": "tiny", "split_digits": True},
        "warmup": {"demonstrations": 2000, "steps": 150},
    },
    True: {
        "policy": {"model": "smollm2"},
        "warmup": {"demonstrations": 160, "steps": 20, "batch_size": 8, "optimizer": "adamw", "learning_rate": 1e-4},
    },
}
REPLY_TOKENS = 80
"""The limit; a right reply has 60 and its end."""


def warm_start(smollm2: bool) -> Path:
    """An ordinary Hugging Face folder in float32, found in the cache where it was made before."""
    from headrace.config import parse
    from headrace.training.jobs import warm_start

    rollout = {"context_limit": 256, "reply_tokens": REPLY_TOKENS}
    return warm_start(parse({**WARM_STARTS[smollm2], "environment": {"name": WORLD}, "rollout": rollout}))


def in_dtype(folder: Path, dtype: str, out: Path) -> Path:
    """The same policy as it would lie on a hub in that precision."""
    from headrace.training import pretrained
    from headrace.training.policy import DTYPES

    model, tokenizer = pretrained.load(str(folder), DTYPES[dtype])
    return pretrained.save(model, tokenizer, out)


def token_counts(folder: Path) -> tuple[int, int]:
    """Of a prompt, and of a right reply with its end."""
    import sums
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    row = sums.rows(1)[0]
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
    return len(prompt), len(tokenizer(" ".join(sums.steps(row["terms"])))["input_ids"]) + 1


def measure(side: str, setting: Setting) -> Measured:
    """In a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--setting", json.dumps(asdict(setting))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-4000:]}")
    return Measured(**json.loads(done.stdout.strip().splitlines()[-1]))


HEADS = (
    ("trainer", "samples per CPU second", "samples per second", "MiB: imports, model, peak", "tokens a sample", "reward", "generating"),
    ("ours over theirs", "speed by CPU time", "speed by wall time", "peak memory", "peak beyond the imports"),
)


def line(columns: Sequence[str]) -> None:
    print(f"| {' | '.join(columns)} |", flush=True)


def show(sides: Sequence[str], found: Mapping[str, Sequence[Measured]]) -> None:
    line(HEADS[0])
    line(["---"] * len(HEADS[0]))
    for side in sides:
        runs = found[side]
        memory = (statistics.median(getattr(run, name) for run in runs) for name in ("imports", "loaded", "peak"))
        columns = (
            Spread.of([run.samples_per_cpu_second for run in runs]).show(2),
            Spread.of([run.samples_per_second for run in runs]).show(2),
            ", ".join(f"{value:,.0f}" for value in memory),
            f"{statistics.mean(run.context_tokens for run in runs):.1f}, {statistics.mean(run.reply_tokens for run in runs):.1f} sampled",
            f"{statistics.mean(run.reward for run in runs):.2f}",
            f"{statistics.median(run.generating for run in runs):.0%}",
        )
        line((side, *columns))
    print()


def compared(ours: Sequence[Measured], theirs: Sequence[Measured]) -> dict[str, Spread]:
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "speed by CPU time": Spread.of([a.samples_per_cpu_second / b.samples_per_cpu_second for a, b in pairs]),
        "speed by wall time": Spread.of([a.samples_per_second / b.samples_per_second for a, b in pairs]),
        "peak memory": Spread.of([a.peak / b.peak for a, b in pairs]),
        "peak beyond the imports": Spread.of([(a.peak - a.imports) / (b.peak - b.imports) for a, b in pairs]),
    }


def show_ratios(sides: Sequence[str], found: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    """The ratios that were printed, for --json."""
    line(HEADS[1])
    line(["---"] * len(HEADS[1]))
    ratios = {}
    for ours in (side for side in sides if not side.startswith("trl")):
        for theirs in (side for side in sides if side.startswith("trl")):
            columns = compared(found[ours], found[theirs])
            line((f"{ours} / {theirs}", *(column.show(2) for column in columns.values())))
            ratios[f"{ours} / {theirs}"] = {name: asdict(column) for name, column in columns.items()}
    return ratios


def alternate(sides: Sequence[str], setting: Setting, repeats: int) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {side: [] for side in sides}
    for repeat in range(repeats):
        first = repeat % len(sides)
        for side in (*sides[first:], *sides[:first]):
            found[side].append(measure(side, setting))
            print(f"repeat {repeat + 1}, {side}: {found[side][-1]}", file=sys.stderr, flush=True)
    return found


def compare(arguments: argparse.Namespace) -> None:
    samples = arguments.samples or (16 if arguments.smollm2 else 64)
    steps, repeats = arguments.steps or (2 if arguments.smollm2 else 6), arguments.repeats or (2 if arguments.smollm2 else 3)
    sides = arguments.sides or [side for side in SIDES if arguments.dtype == "bfloat16" or side != "trl autocast"]
    if samples % GROUP or samples % arguments.rows:
        raise SystemExit(f"--samples must be a multiple of {GROUP} and of --rows")
    start = warm_start(arguments.smollm2)
    with tempfile.TemporaryDirectory() as scratch:
        folder = in_dtype(start, arguments.dtype, Path(scratch) / "policy")
        prompt, reply = token_counts(folder)
        setting = Setting(str(folder), arguments.dtype, samples, steps, arguments.rows, prompt + reply, REPLY_TOKENS)
        name = "SmolLM2-135M-Instruct" if arguments.smollm2 else "tiny policy"
        print(f"{name}, {arguments.dtype}, one thread each; {samples} samples a step, {arguments.rows} rows a pass, prompts of {prompt}")
        print(f"tokens, right replies of {reply}; {steps} steps after one to warm up, medians of {repeats} (lowest-highest)\n", flush=True)
        found = alternate(sides, setting, repeats)
    show(sides, found)
    ratios = show_ratios(sides, found)
    if arguments.json:
        runs = {side: [asdict(run) for run in those] for side, those in found.items()}
        arguments.json.write_text(json.dumps({"model": name, "setting": asdict(setting), "runs": runs, "ratios": ratios}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M-Instruct in place of the tiny policy")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--samples", type=int, help="a step; default 64, with --smollm2 16")
    parser.add_argument("--rows", type=int, default=8, help="samples in one forward and backward pass (TRL's own default)")
    parser.add_argument("--steps", type=int, help="timed, after one more; default 6, with --smollm2 2")
    parser.add_argument("--repeats", type=int, help="default 3, with --smollm2 2")
    parser.add_argument("--sides", nargs="+", choices=SIDES)
    parser.add_argument("--json", type=Path, help="write everything measured to this file too")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(asdict(run_side(arguments.side, Setting(**json.loads(arguments.setting))))))
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
