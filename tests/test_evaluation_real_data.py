"""`headrace evaluate` on public problems in local files: each in its own fields, a policy that has seen none of them."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.environments.math_problems import Columns
from headrace.environments.math_problems.rows import problem_of, read_file
from headrace.training.tiny_policy import TinySizes, make_tiny_policy

pytest.importorskip("pydantic_monty")
pytest.importorskip("math_verify")
DATA = Path(os.environ.get("HEADRACE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
SETS = {
    "gsm8k": ("gsm8k", "gsm8k", {}),
    "amc23": ("file", "math_eval/amc23.jsonl", {}),
    "asdiv": ("file", "math_eval/asdiv.jsonl", {"question": "{body} {question}"}),
    "college_math": ("file", "math_eval/college_math.jsonl", {}),
    "mawps_singleop": ("file", "math_eval/mawps_singleop.jsonl", {"question": "input", "answer": "target"}),
    "svamp": ("file", "math_eval/svamp.jsonl", {"question": "{Body} {Question}", "answer": "Answer", "id": "ID"}),
}
CONFIG = """
[environment]
name = "math"
options = { source = "offline", levels = [1], max_turns = 2, texts = "terse" }
[policy]
model = "%s"
[rollout]
context_limit = 1536
reply_tokens = 8
[evaluation]
concurrency = 20
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A configuration of the offline problems with an untrained policy, whose tokenizer has read the offline problems too."""
    from headrace.environments import math_problems

    folder = tmp_path_factory.mktemp("policy")
    texts = [str(task.payload["question"]) for task in math_problems.tasks("warmup", 200, levels=[1])]
    make_tiny_policy(texts, folder / "policy", TinySizes(layers=1, width=32, heads=2, kv_heads=1, ffn=64, context=1536), seed=0)
    path = folder / "offline.toml"
    path.write_text(CONFIG % (folder / "policy"))
    return path


@pytest.mark.parametrize("name", SETS)
def test_an_offline_configuration_is_evaluated_on_twenty_problems_of_a_local_set(name, config):
    source, path, columns = SETS[name]
    if not (DATA / path).exists():
        pytest.skip(f"no shared data at {DATA / path}; set HEADRACE_DATA")
    options = {"source": f'"{source}"', "path": f'"{DATA / path}"', "splits": '["train", "test"]' if name == "gsm8k" else '["test"]'}
    options["columns"] = "{" + ", ".join(f'{key} = "{place}"' for key, place in columns.items()) + "}"
    changed = [part for key, value in options.items() for part in ("--set", f"environment.options.{key}={value}")]
    arguments = ["evaluate", str(config), "--split", "test", "--tasks", "20", "--attempts", "2", "--json", *changed]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception or done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["attempts"], found["failed"], found["without_room"]) == (40, 0, 0)
    assert [(e["name"], e["tasks"]) for e in found["estimates"]] == [("mean@2", 20), ("pass@2", 20), ("maj@2", 20)]


@pytest.mark.parametrize(("name", "first"), [("svamp", "145"), ("mawps_singleop", "14"), ("asdiv", "9 (apples)"), ("amc23", "27")])
def test_the_mapping_finds_the_gold_answer(name, first):
    _, path, columns = SETS[name]
    if not (DATA / path).exists():
        pytest.skip(f"no shared data at {DATA / path}; set HEADRACE_DATA")
    problem = problem_of(next(read_file(DATA / path)), Columns.of(columns), name)
    assert problem.answer == first and len(problem.question) > 20
