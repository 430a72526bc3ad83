"""A run directory as a trained run leaves it, made in a moment and without a model: for everything that reads runs."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev

import tomli_w
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from headrace.algorithms import recipe
from headrace.curves import trapezoid_area
from headrace.records.metrics import MetricsFile, UpdateMetrics
from headrace.records.run_store import RunStore
from headrace.rollout.trajectory import Consumption, Dispatch, Drop, Prior, Publication, Receipt, TokenRow, Trajectory, Turn
from headrace.training.credit import credit
from headrace.training.folds import RunState

KINDS = {
    "pick_and_place_simple": "put some mug on desk",
    "look_at_obj_in_light": "look at watch under the desklamp",
    "pick_two_obj_and_place": "put two cup in cabinet",
}
EVIL = "<script>document.title = 'broken'</script> & \"quotes\" </script><img src=x onerror=alert(1)>"
PLACES = ("desk 1", "shelf 1", "shelf 2", "drawer 1", "cabinet 3", "fridge 1", "sidetable 1", "dresser 1")
THINGS = ("mug 1", "watch 2", "cup 1", "pen 3", "book 1", "apple 2")
CONTROL = ("<|user|>", "<|assistant|>", "<|end|>")
_PIECES = re.compile(r" ?\w+|[^\w]")


@dataclass
class FakeRun:
    """``skill`` is where success starts, ``gain`` what it wins over the run. ``evil`` puts markup into a world's text."""

    folder: Path
    recipe_name: str = "spo++"
    updates: int = 12
    batch: int = 16
    seed: int = 0
    skill: float = 0.3
    gain: float = 0.35
    evil: bool = False
    drops: bool = True
    vocabulary: dict[str, int] = field(default_factory=lambda: {token: i for i, token in enumerate(CONTROL)})

    def write(self) -> Path:
        self.recipe = recipe(self.recipe_name)
        self.chance = random.Random(self.seed)
        self.clock = 0.0
        self.rewards: list[float] = []
        self.state = RunState(self.recipe.new_memory())
        self.tasks = [(f"house-{i:03d}-{kind}", kind) for i in range(self.batch * 2) for kind in [list(KINDS)[i % len(KINDS)]]]
        with RunStore.create(self.folder, clock=lambda: self.clock) as self.store:
            self.metrics = MetricsFile(self.folder)
            for task, _ in self.tasks:
                self.log(Prior(task, 2.4, 5.6, 0, 2.2, 8))
            for update in range(self.updates):
                self.update(update)
        self.write_config()
        self.write_evaluations()
        self.write_tokenizer()
        return self.folder

    def log(self, event, trajectory=None):
        position = self.store.append(event) if trajectory is None else self.store.append_receipt(event, trajectory)
        self.state.apply(event, position)

    def update(self, update):
        share = update / max(1, self.updates - 1)
        batch = [one for _ in range(self.batch // self.recipe.group_size) for one in self.attempts(share)]
        if self.drops and update % 3 == 1:
            self.send_and_drop()
        credits = credit(batch, self.recipe)
        self.clock += 6.5
        number = self.state.next_batch
        for trajectory, advantage in zip(batch, credits.advantages, strict=True):
            self.log(Consumption(trajectory.dispatch.number, number, advantage))
        self.log(Publication(self.state.version + 1, number))
        self.metrics.append(self.measured(number, share, batch, credits))

    def attempts(self, share):
        """One attempt, or the siblings of a group."""
        task, kind = self.chance.choice(self.tasks)
        group = self.state.next_dispatch if self.recipe.group_size > 1 else None
        return [self.one_attempt(task, kind, group, share) for _ in range(self.recipe.group_size)]

    def one_attempt(self, task, kind, group, share):
        sent = self.dispatch(task, kind, group)
        ease = {"pick_and_place_simple": 0.1, "look_at_obj_in_light": 0.0, "pick_two_obj_and_place": -0.2}[kind]
        success = self.chance.random() < self.skill + ease + self.gain * share**0.6
        turns = self.talk(kind, success)
        reason = "success" if success else "horizon"
        rows = (self.row(turns, sent.version),)
        trajectory = Trajectory(sent, rows, turns, float(success), success, reason, self.chance.randint(0, 2), 1.5, 0.002)
        self.clock += 0.05
        self.log(Receipt(sent.number, trajectory.outcome, success, trajectory.action_tokens, trajectory.reason), trajectory)
        return trajectory

    def dispatch(self, task, kind, group=None):
        version = self.state.version
        value = self.state.memory.read(task, version) if self.state.memory else None
        alpha, beta = (value.alpha, value.beta) if value else (None, None)
        sent = Dispatch(self.state.next_dispatch, task, kind, version, alpha, beta, group, 1)
        self.log(sent)
        return sent

    def send_and_drop(self):
        engine = EVIL if self.evil else "out of memory"
        for reason, detail in (("environment_deadline", "house-003 did not answer"), ("engine_error", engine)):
            sent = self.dispatch(*self.tasks[3])
            self.log(Drop(sent.number, reason, detail))

    def talk(self, kind, success):
        length = self.chance.randint(3, 6) if success else self.chance.randint(8, 14)
        seen = f"You are in the middle of a room. Looking quickly around you, you see a {', a '.join(PLACES)}."
        text = f"{seen}\n\nYour task is to: {KINDS[kind]}."
        if self.evil:
            text += f"\n{EVIL}"
        turns = []
        for step in range(length):
            place, thing = self.chance.choice(PLACES), self.chance.choice(THINGS)
            done = success and step == length - 1
            action = (
                f"move {thing} to {place}"
                if done
                else self.chance.choice([f"go to {place}", f"open {place}", f"take {thing} from {place}"])
            )
            turns.append(Turn(text, action))
            text = self.chance.choice(
                [f"You arrive at {place}. On the {place}, you see a {thing}.", "Nothing happens.", f"The {place} is closed."]
            )
        return tuple(turns)

    def row(self, turns, version):
        ids, mask, logprobs = [], [], []
        for i, turn in enumerate(turns):
            seen = self.encode(("<|user|>" if i == 0 else "") + turn.observation + "<|assistant|>")
            said = self.encode(turn.action + "<|end|>")
            ids += seen + said
            mask += [False] * len(seen) + [True] * len(said)
            logprobs += [0.0] * len(seen) + [-round(self.chance.expovariate(1.6) * 64) / 64 for _ in said]
        versions = tuple(version if sampled else -1 for sampled in mask)
        return TokenRow(tuple(ids), tuple(mask), tuple(logprobs), versions)

    def encode(self, text):
        pieces = [piece for part in re.split(r"(<\|\w+\|>)", text) for piece in ([part] if part in CONTROL else _PIECES.findall(part))]
        return [self.vocabulary.setdefault(piece, len(self.vocabulary)) for piece in pieces]

    def measured(self, number, share, batch, credits):
        good = [t.action_tokens for t in batch if t.success]
        bad = [t.action_tokens for t in batch if not t.success]
        self.rewards.append(fmean(t.outcome for t in batch))
        kinds = {kind: [t.success for t in batch if t.dispatch.kind == kind] for kind in sorted(KINDS)}
        wobble = self.chance.random
        return UpdateMetrics(
            update=number, version=self.state.version, clock=self.clock, seconds=7.3, attempts=len(batch), reward=self.rewards[-1],
            success=fmean(t.success for t in batch), area=trapezoid_area(self.rewards),
            value=fmean(t.dispatch.value for t in batch) if self.recipe.memory else None,
            success_by_kind={kind: fmean(found) for kind, found in kinds.items() if found},
            attempts_by_kind={kind: len(found) for kind, found in kinds.items() if found},
            success_tokens=fmean(good) if good else math.nan, failure_tokens=fmean(bad) if bad else math.nan,
            length_advantage_covariance=credits.length_covariance, actor_residual=credits.actor_residual,
            advantage_mean=fmean(credits.advantages), advantage_std=pstdev(credits.advantages),
            degenerate=credits.degenerate, sets=credits.cells, loss=0.02 * wobble(),
            ratio_mean=1 + 0.004 * (wobble() - 0.5), ratio_std=0.05 + 0.03 * wobble(), ratio_max=1.6,
            clip_low_fraction=0.01 * wobble(), clip_high_fraction=0.004 * wobble(), dual_clip_fraction=0.0002 * wobble(),
            rollout_correction_mean=1 - 0.01 * wobble(), rollout_truncated_fraction=0.001 * wobble(), kl=0.004 + 0.004 * wobble(),
            entropy=0.9 - 0.3 * share + 0.05 * wobble(), gradient_norm=0.5 + 0.3 * wobble(), learning_rate=1e-4 * min(1, (number + 1) / 4),
            other={"effective_sample_size": 0.99 - 0.02 * wobble(), "gradient_norm_max": 1 + wobble(), "rollout_mismatch": 0.01},
            staleness_mean=0.3 + 0.2 * wobble(), staleness_max=1, drops={"environment_deadline": 1} if number % 3 == 1 else {},
            unmatched_actions=sum(t.unmatched_actions for t in batch), actions=sum(len(t.turns) for t in batch),
            sampled_tokens=sum(t.action_tokens for t in batch), trained_tokens=sum(t.context_tokens for t in batch),
            generation_seconds=math.fsum(t.generation_seconds for t in batch),
            environment_seconds=math.fsum(t.environment_seconds for t in batch),
            training_seconds=4.4 + wobble() / 3, waiting_seconds=2.1 + wobble() / 2, publication_seconds=0.03,
            checkpoint_seconds=0.2 if number % 5 == 4 else 0.0,
        )  # fmt: skip

    def write_config(self):
        config = {
            "recipe": self.recipe_name,
            "seed": self.seed,
            "environment": {"name": "household"},
            "run": {"updates": self.updates, "clock": "real"},
        }
        (self.folder / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")

    def write_evaluations(self):
        rows = []
        for split, penalty in (("train", 0.0), ("unseen", 0.07)):
            for update, success in ((0, self.skill - penalty), (self.updates, self.skill + self.gain - penalty)):
                by_kind = {kind: {"success": success, "attempts": 170} for kind in KINDS}
                row = {"split": split, "update": update, "success": success, "low": success - 0.04, "high": success + 0.04}
                rows.append(row | {"attempts": 512, "failed": 0, "mean_outcome": success, "by_kind": by_kind})
        (self.folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def write_tokenizer(self):
        tokenizer = Tokenizer(models.WordLevel(self.vocabulary, unk_token=CONTROL[0]))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+|[^\w]"), "isolated")
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
        (self.folder / "policy").mkdir(exist_ok=True)
        tokenizer.save(str(self.folder / "policy" / "tokenizer.json"))
