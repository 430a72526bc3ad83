"""What an evaluation says: numbers by hand from made-up attempts, printed and as JSON; and what `headrace evaluate` refuses."""

import json

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import to_toml
from headrace.environments.worlds import Answers
from headrace.errors import UserError
from headrace.evaluation_statistics import wilson_interval
from headrace.rollout.trajectory import Dispatch, Failure, Trajectory, Turn
from headrace.training import evaluation, jobs
from headrace.training.evaluation import summarize
from headrace.training.run import train

NAN = float("nan")
ANSWERS = Answers(lambda reply: reply.removeprefix("answer ") if reply.startswith("answer ") else None, lambda a, b: float(a) == float(b))


def attempt(task, reply, outcome, *, reason="answered", turns=None):
    said = (Turn("?", "thinking"), Turn("?", reply)) if turns is None else turns
    return Trajectory(Dispatch(0, task, f"kind of {task}", 0, None, None, None, 0), (), said, outcome, outcome == 1, reason)


def failure(task):
    return Failure(Dispatch(0, task, f"kind of {task}", 0, None, None, None, 0), "engine_deadline", "")


def two_tasks():
    """Three attempts each: at a two right ones that write the same number differently, at b one."""
    return [
        *(attempt("a", reply, outcome) for reply, outcome in (("answer 5", 1.0), ("answer 5.0", 1.0), ("answer 7", 0.0))),
        *(attempt("b", reply, outcome) for reply, outcome in (("answer 1", 0.0), ("answer 1", 0.0), ("answer 2", 1.0))),
    ]


def values(found):
    return {estimate.name: estimate.value for estimate in found.estimates}


def test_mean_pass_and_majority_by_hand():
    found = summarize("train", 0, two_tasks(), k=2, answers=ANSWERS)
    # pass@2: a always, b unless both wrong ones are drawn: (1 + 2/3) / 2.
    # maj@2, over the three pairs: a (1 + 1/2 + 1/2) / 3, b (0 + 1/2 + 1/2) / 3.
    assert values(found) == pytest.approx({"mean@2": 0.5, "pass@2": 5 / 6, "maj@2": 0.5})
    assert found.success == 0.5 and found.k == 2
    assert values(summarize("train", 0, two_tasks(), answers=ANSWERS)) == pytest.approx({"mean@3": 0.5, "pass@3": 1.0, "maj@3": 0.5})


def test_a_world_without_answers_has_no_majority():
    assert list(values(summarize("train", 0, two_tasks()))) == ["mean@3", "pass@3"]


def test_equal_tasks_get_wilsons_interval_over_tasks():
    found = summarize("train", 0, [attempt(str(number), "answer 1", 1.0) for number in range(20)], answers=ANSWERS)
    interval = wilson_interval(20, 20)
    assert [(e.name, e.low, e.high, e.tasks) for e in found.estimates] == [
        (f"{n}@1", interval.low, 1.0, 20) for n in ("mean", "pass", "maj")
    ]


def test_tasks_with_too_few_scored_attempts_are_left_out_and_counted():
    results = [*two_tasks(), attempt("c", "answer 1", 1.0), attempt("c", "answer 1", NAN, reason="grader_error"), failure("c")]
    found = summarize("train", 0, results, k=2, answers=ANSWERS)
    assert values(found) == pytest.approx({"mean@2": 0.5, "pass@2": 5 / 6, "maj@2": 0.5})
    assert {(estimate.tasks, estimate.left_out) for estimate in found.estimates} == {(2, 1)}
    assert (found.attempts, found.failed) == (7, 2)


def test_where_no_task_has_enough_attempts_there_is_no_estimate():
    assert summarize("train", 0, [failure("a"), attempt("a", "answer 1", 1.0)]).estimates == ()
    assert summarize("train", 0, []).estimates == ()


def test_a_reply_that_was_cut_off_has_no_vote():
    results = [attempt("a", "answer 5", 1.0), attempt("a", "answer 6", 0.0, reason="reply"), attempt("a", "nothing", 0.0, reason="horizon")]
    assert values(summarize("train", 0, results, answers=ANSWERS))["maj@3"] == 1.0


def test_degrees_of_success_are_no_success_to_any_estimate():
    results = [attempt("a", "answer 5", 0.5), attempt("a", "answer 5", 0.5)]
    found = summarize("train", 0, results, answers=ANSWERS)
    assert (found.mean_outcome, found.success) == (0.5, 0.0) and set(values(found).values()) == {0.0}


# --- the command -------------------------------------------------------------------------------------------------------


def headrace(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.exception or result.output
    return result.stdout


@pytest.fixture
def toy_file(toy_config, tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(to_toml(toy_config()))
    return path


@pytest.fixture
def made_up(monkeypatch):
    """Attempts by hand in place of the policy's."""
    results = two_tasks()

    async def measured(*_):
        return results

    monkeypatch.setattr(jobs, "measured_attempts", measured)
    return results


def test_the_printed_evaluation_has_the_numbers_by_hand(toy_file, made_up):
    text = headrace("evaluate", toy_file, "--plain", "--k", 2)
    assert "mean@2 0.500 [0.333, 0.667] over 2 tasks" in text  # a quarter of the samples holds a twice, a quarter b
    assert "pass@2 0.833 [0.667, 1.000] over 2 tasks" in text
    assert "maj@" not in text  # the toy world reads no answers


def test_json_carries_the_estimates(toy_file, made_up):
    found = json.loads(headrace("evaluate", toy_file, "--json", "--attempts", 3))
    assert [(e["name"], round(e["value"], 6), e["tasks"], e["left_out"]) for e in found["estimates"]] == [
        ("mean@3", 0.5, 2, 0),
        ("pass@3", 1.0, 2, 0),
    ]
    assert found["success"] == 0.5 and found["k"] == 3 and found["by_kind"]["kind of a"] == {"success": pytest.approx(2 / 3), "attempts": 3}


def test_what_could_not_be_measured_is_said(toy_file, made_up):
    made_up[:] = [attempt("a", "", 0.0, reason="context", turns=()), failure("a")]
    text = " ".join(headrace("evaluate", toy_file, "--plain").split())
    assert "1 attempts had no room for a reply and count as no success; raise rollout.context_limit." in text
    assert "No task has 2 scored attempts, so there is no mean@2, pass@2 or maj@2." in text
    assert "1 attempts ended in an error" in text


def test_a_runs_world_can_be_changed_for_its_evaluation(toy_config, tmp_path):
    train(toy_config(run={"updates": 1}), out=tmp_path / "run")
    own = jobs.evaluate(tmp_path / "run", attempts=2)
    harder = jobs.evaluate(tmp_path / "run", attempts=2, overrides=["environment.options.turns=3", "evaluation.seed=5"])
    assert harder.success < own.success  # three right words in a row instead of one
    assert (own.update, harder.update) == (1, 1)


def test_a_configuration_is_its_policy_before_training(toy_file, toy_policy):
    before = jobs.evaluate(toy_file, attempts=2)
    assert before == jobs.evaluate(toy_policy, toy_file, attempts=2) and before.update == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--attempts", 2, "--k", 3], "--k 3 is more than the 2 attempts at each task; add --attempts 3 or lower --k"),
        (["--set", "policy.model=other"], "is evaluated as it is; name another run or model instead"),
        (["--set", "policy.lora.rank=2"], "is evaluated as it is; name another run or model instead"),
        (["--set", "learner.epochs=2"], "an evaluation does not read learner.epochs; it reads environment, rollout"),
        (["--set", "rollout.batch_sise=2"], "unknown key `rollout.batch_sise`; did you mean `rollout.batch_size`?"),
        (["--split", "nowhere"], "the toy world has the splits train and unseen"),
    ],
)
def test_what_cannot_be_evaluated_is_one_sentence(arguments, sentence, toy_file, toy_policy):
    with pytest.raises(UserError) as refused:
        headrace("evaluate", toy_policy, "--config", toy_file, *arguments)
    assert sentence in str(refused.value)


def test_a_target_without_a_configuration_and_one_with_two_are_refused(toy_file, toy_policy, tmp_path):
    with pytest.raises(UserError, match="name a configuration with --config"):
        headrace("evaluate", toy_policy)
    with pytest.raises(UserError, match="leave --config out"):
        headrace("evaluate", toy_file, "--config", toy_file)
    with pytest.raises(UserError, match="no such configuration file"):
        headrace("evaluate", tmp_path / "absent.toml")


def test_evaluations_during_training_carry_the_estimates(toy_config, tmp_path):
    result = train(toy_config(run={"updates": 1}, evaluation={"attempts": 2}), out=tmp_path / "run")
    assert [[e.name for e in found.estimates] for found in result.evaluations] == [["mean@2", "pass@2"]] * 2
    rows = evaluation.read(tmp_path / "run" / evaluation.EVALUATIONS_FILE)
    assert [[e["name"] for e in row["estimates"]] for row in rows] == [["mean@2", "pass@2"]] * 2
    assert rows[0]["estimates"][0]["value"] == result.evaluations[0].success
