import json
import math
from dataclasses import replace

import pytest
import torch

from fakes import taught_toy
from headrace.config import parse
from headrace.errors import UserError
from headrace.rollout.chat import ChatCodec
from headrace.rollout.trajectory import TokenRow, Turn
from headrace.training import initial_policy as initial
from headrace.training.adapters import LoraSettings
from headrace.training.initial_policy import initial_policy
from headrace.training.observer import Silent
from headrace.training.policy import Policy
from headrace.training.tiny_policy import TinySizes, make_tiny_policy
from headrace.training.warmup import ProbeResult, WarmupSettings, action_loss, hidden_matrices, warm_start, weighted_pack

COLOURS = ("red", "green", "blue", "white")
TEXTS = [text for colour in COLOURS for text in (f"say {colour}", colour)] * 4
SIZES = TinySizes(layers=1, width=32, heads=2, kv_heads=1, ffn=64, context=128)
FAST = WarmupSettings(steps=25, batch_size=8, held_out=8, rising_steps=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_policy(TEXTS, tmp_path_factory.mktemp("warmup") / "start", SIZES, seed=0)


@pytest.fixture
def policy(folder):
    return Policy.load(folder)


@pytest.fixture(scope="module")
def lessons(folder):
    codec = ChatCodec(Policy.load(folder).tokenizer)
    return [codec.demonstrate([Turn(f"say {COLOURS[i % 4]}", COLOURS[i % 4])]) for i in range(48)]


def row(ids, mask):
    return (TokenRow(tuple(ids), tuple(bool(m) for m in mask), (0.0,) * len(ids), (-1,) * len(ids)),)


# --- the loss ---


def test_action_tokens_weigh_one_and_other_tokens_what_the_settings_say():
    batch, weight_m = weighted_pack([row([5, 6, 7, 8], [0, 0, 1, 0]), row([5, 9, 4, 3, 2], [0, 1, 1, 0, 1])], 0.3)
    weights = dict(zip(batch.rows.target_m.tolist(), weight_m.tolist(), strict=True))
    assert weights == pytest.approx({6: 0.3, 7: 1.0, 8: 0.3, 9: 1.0, 4: 1.0, 3: 0.3, 2: 1.0})


def test_without_a_weight_on_observations_only_actions_are_scored():
    batch, weight_m = weighted_pack([row([5, 6, 7, 8], [0, 0, 1, 0])], 0.0)
    assert batch.rows.target_m.tolist() == [7]
    assert weight_m.tolist() == [1.0]


def test_the_loss_of_a_step_is_the_weighted_mean_over_all_its_micro_batches(policy, lessons):
    batch = lessons[:6]
    total = weight = 0.0
    with torch.no_grad():
        for (only,) in batch:
            ids = torch.tensor([only.token_ids])
            logprobs = policy.model(input_ids=ids).logits[0].double().log_softmax(-1)
            for t in range(1, len(only.token_ids)):
                w = 1.0 if only.action_mask[t] else 0.3
                total -= w * float(logprobs[t - 1, only.token_ids[t]])
                weight += w
    seen = []
    for max_tokens in (10_000, 20):
        learner = Policy.load(policy.name)
        settings = replace(FAST, steps=1, batch_size=6, held_out=0, max_tokens=max_tokens)
        warm_start(learner, batch, settings, progress=lambda progress: seen.append(progress.loss))
    assert seen == pytest.approx([total / weight] * 2, rel=1e-5)


def test_held_out_loss_is_the_mean_over_action_tokens(policy, lessons):
    total = count = 0.0
    with torch.no_grad():
        for (only,) in lessons[:5]:
            logprobs = policy.model(input_ids=torch.tensor([only.token_ids])).logits[0].double().log_softmax(-1)
            for t in range(1, len(only.token_ids)):
                if only.action_mask[t]:
                    total -= float(logprobs[t - 1, only.token_ids[t]])
                    count += 1
    assert action_loss(policy, lessons[:5]) == pytest.approx(total / count, rel=1e-5)
    assert math.isnan(action_loss(policy, []))


# --- learning ---


def test_the_policy_learns_and_the_report_says_how_much(policy, lessons):
    before = action_loss(policy, lessons[-8:])
    report = warm_start(policy, lessons, FAST)
    assert report.held_out_loss == pytest.approx(action_loss(policy, lessons[-8:]), rel=1e-5)
    assert report.held_out_loss < 0.5 * before
    assert (report.steps, report.demonstrations, report.success, report.reached_target) == (25, 40, None, None)
    assert report.tokens == pytest.approx(25 * 8 * len(lessons[0][0].token_ids))


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(folder, lessons):
    weights = []
    for seed in (1, 1, 2):
        learner = Policy.load(folder)
        torch.manual_seed(100 + len(weights))  # what the global source says must not matter
        warm_start(learner, lessons, replace(FAST, steps=3, seed=seed))
        weights.append(torch.cat([tensor.flatten() for tensor in learner.weights().values()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_muon_takes_the_hidden_matrices_and_nothing_else(policy):
    names = set(hidden_matrices(policy))
    assert len(names) == 7
    assert all(name.endswith("_proj.weight") for name in names)


def test_a_policy_with_lora_is_warmed_by_adamw_through_its_adapters(folder, lessons):
    learner = Policy.load(folder, lora=LoraSettings(rank=4))
    with pytest.raises(ValueError, match="LoRA"):
        warm_start(learner, lessons, FAST)
    before = action_loss(learner, lessons[-8:])
    report = warm_start(learner, lessons, replace(FAST, optimizer="adamw", learning_rate=2e-2))
    assert report.held_out_loss < before


def test_the_learning_rate_rises_stays_and_falls_to_a_tenth():
    settings = WarmupSettings(steps=100, rising_steps=4, falling_share=0.4)
    assert [settings.shape(step) for step in (0, 3, 4, 60, 80, 100)] == pytest.approx([0.2, 0.8, 1.0, 1.0, 0.55, 0.1])
    assert WarmupSettings(steps=10, rising_steps=0, falling_share=0.0).shape(9) == 1.0


def test_a_loss_that_is_no_number_ends_the_warm_start(policy, lessons):
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[:] = math.nan
    with pytest.raises(ArithmeticError, match="step 1"):
        warm_start(policy, lessons, FAST)


@pytest.mark.parametrize("demonstrations", [[], [row([4, 5, 6], [0, 0, 0])] * 3])
def test_nothing_to_learn_from_is_refused(policy, demonstrations):
    with pytest.raises(ValueError, match="no action to learn from"):
        warm_start(policy, demonstrations, replace(FAST, held_out=1))


@pytest.mark.parametrize(
    ("name", "value"), [("steps", 0), ("batch_size", 0), ("learning_rate", 0.0), ("observation_weight", -1.0), ("falling_share", 1.5)]
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        replace(FAST, **{name: value})


# --- probes ---


def probed(policy, lessons, successes, **changes):
    """(report, steps at which a probe was taken) of a warm start whose probes find ``successes`` in turn."""
    found, at, steps = iter(successes), [], []

    def probe(_):
        at.append(len(steps) + 1)
        return ProbeResult(next(found), 10)

    report = warm_start(policy, lessons, replace(FAST, **changes), probe=probe, progress=lambda progress: steps.append(progress.step))
    return report, at


def test_training_ends_at_the_first_probe_that_reaches_the_target(policy, lessons):
    report, at = probed(policy, lessons, [0.1, 0.29, 0.3, 0.9], steps=20, probe_every=3, probe_from=4, target_success=0.3)
    assert at == [6, 9, 12]
    assert (report.steps, report.success, report.reached_target) == (12, 0.3, True)


def test_a_target_never_reached_is_reported_after_the_last_step(policy, lessons):
    report, at = probed(policy, lessons, [0.1, 0.1, 0.2], steps=8, probe_every=3, target_success=0.3)
    assert at == [3, 6, 8]
    assert (report.steps, report.success, report.reached_target) == (8, 0.2, False)
    assert [step for step, _ in report.probes] == [3, 6, 8]


def test_without_a_target_probes_are_for_the_eye_only(policy, lessons):
    report, at = probed(policy, lessons, [1.0, 1.0], steps=4, probe_every=2)
    assert at == [2, 4]
    assert (report.steps, report.reached_target) == (4, None)


# --- a configuration's initial policy, kept in the cache ---


@pytest.fixture
def config(tmp_path):
    def make(**sections):
        data = {
            "environment": {"name": f"{taught_toy.__file__}:taught", "tasks": 4},
            "policy": {"model": "tiny", "layers": 1, "width": 32},
            "warmup": {
                "demonstrations": 160,
                "steps": 60,
                "learning_rate": 3e-2,
                "batch_size": 8,
                "probe_attempts": 16,
                "target_success": 0.9,
                "probe_every": 10,
            },
            "rollout": {"context_limit": 64, "reply_tokens": 4},
            "run": {"cache": str(tmp_path / "cache")},
        }
        for name, value in sections.items():
            data[name] = {**data[name], **value}
        return parse(data)

    return make


def made(config, observer=None):
    return initial_policy(config, observer or Silent())


def test_a_model_without_a_warm_start_is_taken_as_it_is(config):
    assert made(parse({"policy": {"model": "some/name"}})) == "some/name"


def test_the_initial_policy_can_do_what_was_demonstrated(config):
    folder = made(config())
    report = json.loads((folder / "warmup.json").read_text())
    assert report["reached_target"] is True and report["steps"] < 60
    assert report["probes"][-1][1]["success"] >= 0.9
    assert set(report["probes"][-1][1]["by_kind"]) == set(COLOURS)
    assert Policy.load(folder).describe().parameters < 50_000


def test_with_lora_a_tiny_policy_is_warmed_as_a_whole(config):
    """An adapter on random weights could learn next to nothing; and the probe has no pretrained policy to load."""
    folder = made(config(policy={"lora": {"rank": 2}}))
    report = json.loads((folder / "warmup.json").read_text())
    assert report["reached_target"] is True
    assert Policy.load(folder).lora is None


def test_a_second_time_it_comes_from_the_cache(config, monkeypatch):
    folder = made(config())
    monkeypatch.setattr(initial, "_make", lambda *_: pytest.fail("made again"))
    assert made(config()) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    "change",
    [
        {"warmup": {"seed": 1}},
        {"warmup": {"steps": 61}},
        {"environment": {"options": {"wrong_every": 2}}},
        {"environment": {"options": {"words": "!"}}},
        {"policy": {"width": 64}},
        {"rollout": {"context_limit": 65}},
    ],
    ids=str,
)
def test_whatever_would_make_another_policy_has_another_place(config, monkeypatch, change):
    places = []

    def note(config, material, folder, observer):
        places.append(folder)
        raise UserError("enough")

    monkeypatch.setattr(initial, "_make", note)
    for sections in ({}, {}, change):
        with pytest.raises(UserError, match="enough"):
            made(config(**sections))
    assert places[0] == places[1] != places[2]


def test_what_was_left_half_written_is_made_anew(config):
    folder = made(config())
    (folder / "config.json").unlink()
    assert made(config()) == folder
    assert (folder / "config.json").is_file()


def test_a_crash_in_the_middle_leaves_nothing_behind(config, monkeypatch, tmp_path):
    def crash(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(initial, "warm_start", crash)
    with pytest.raises(KeyboardInterrupt):
        made(config())
    assert list((tmp_path / "cache" / "warmup").iterdir()) == []


def test_progress_and_success_reach_the_observer(config):
    class Notes(Silent):
        def __init__(self):
            self.texts, self.notes, self.phases = [], [], []

        def phase(self, name, total=None):
            self.phases.append((name, total))

        def progress(self, done, text=""):
            self.texts.append((done, text))

        def note(self, text):
            self.notes.append(text)

    notes = Notes()
    made(config(), notes)
    assert notes.phases == [("warm start", 60)]
    assert notes.texts[0][0] == 1 and notes.texts[0][1].startswith("loss ")
    assert "success" in notes.texts[-1][1]
    assert len(notes.notes) == 1 and "warm start" in notes.notes[0]


def test_a_world_that_cannot_demonstrate_is_refused_in_one_sentence(config):
    with pytest.raises(UserError, match="no scripted demonstrations"):
        made(config(environment={"name": "alfworld", "options": {}}))


def test_tasks_without_a_single_demonstration_are_refused_in_one_sentence(config, tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(f'{{"question": "Compute {n} + 1.", "answer": "{n + 1}"}}\n' for n in range(60)))
    with pytest.raises(UserError, match=r"no scripted demonstration for any of the \d+ tasks of its split 'warmup'"):
        made(config(environment={"name": "math", "options": {"source": "file", "path": str(path)}}))


def test_demonstrations_longer_than_the_context_are_refused_in_one_sentence(config):
    with pytest.raises(UserError, match="context_limit = 3"):
        made(config(rollout={"context_limit": 3, "reply_tokens": 1}))


def test_a_cache_that_cannot_be_written_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.cache"):
        made(config(run={"cache": str(tmp_path / "file")}))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_household_start_leaves_room_to_learn(seed, tmp_path):
    from pathlib import Path

    from headrace.config import load
    from headrace.training.jobs import evaluate

    quickstart = Path(__file__).parents[2] / "configs" / "household" / "quickstart.toml"
    config = load(quickstart, [f"warmup.seed={seed}", f"run.cache={json.dumps(str(tmp_path))}"])
    start = evaluate(initial_policy(config, Silent()), config, split="train", attempts=4)
    assert 0.25 <= start.success <= 0.40
    assert all(kind.success > 0 for kind in start.by_kind.values())
