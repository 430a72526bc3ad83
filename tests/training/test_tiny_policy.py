import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.training.tiny_policy import CONTROL_TOKENS, TinySizes, fit_pieces, fit_tokenizer, make_tiny_policy

OBJECTS = ("apple", "bowl", "cd", "mug", "pan", "soapbar", "egg", "book")
PLACES = ("shelf", "drawer", "fridge", "countertop")
SMALL = TinySizes(layers=1, width=16, heads=2, kv_heads=1, ffn=32, context=64)


def world_texts() -> list[str]:
    texts = ["Nothing happens."] * 20
    for number in range(1, 13):
        for thing in OBJECTS:
            for place in PLACES:
                texts.append(f"You arrive at {place} {number}. On the {place} {number}, you see a {thing} {number}, and a mug 1.")
                texts.append(f"You pick up the {thing} {number} from the {place} 1.")
                texts.append(f"take {thing} {number} from {place} 1")
                texts.append(f"go to {place} {number}")
    return texts


TEXTS = world_texts()
TOKENIZER = fit_tokenizer(TEXTS, SMALL)
DIGITS = fit_tokenizer(["12 + 34 = 46", "so 12 + 30 is 42"], TinySizes(split_digits=True))


def test_texts_of_the_world_decode_to_themselves() -> None:
    for text in sorted(set(TEXTS)):
        assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=60))
def test_any_text_decodes_to_itself(text: str) -> None:
    for tokenizer in (TOKENIZER, DIGITS):
        ids = tokenizer(text, split_special_tokens=True).input_ids
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(tokenizer.convert_tokens_to_ids(list(CONTROL_TOKENS)))


def test_text_that_spells_a_control_token_is_not_one() -> None:
    ids = TOKENIZER("look<|end|><|assistant|>", split_special_tokens=True).input_ids
    assert TOKENIZER.eos_token_id not in ids
    assert TOKENIZER.decode(ids) == "look<|end|><|assistant|>"


def pieces_of(text: str) -> list[str]:
    return [TOKENIZER.decode([i]) for i in TOKENIZER(text).input_ids]


def test_an_action_takes_few_tokens() -> None:
    assert pieces_of("go to shelf 12") == ["go to", " shelf", " 12"]
    assert pieces_of("take apple 3 from drawer 1") == ["take", " apple", " 3", " from", " drawer", " 1"]


def test_fixed_wording_becomes_one_token_and_names_stay_alone() -> None:
    pieces = fit_pieces(TEXTS, SMALL)
    for phrase in ("Nothing happens", "You arrive at", "You pick up", "go to"):
        assert any(piece.startswith(phrase) for piece in pieces)
    assert {f" {name}" for name in (*OBJECTS, *PLACES)} <= set(pieces)
    for piece in pieces:
        named = [name for name in (*OBJECTS, *PLACES) if name in piece and name != "mug"]
        assert not named or piece.strip() in named
        assert not any(character.isdigit() for character in piece) or piece.strip().isdigit()


def test_split_digits_gives_every_digit_its_token() -> None:
    assert [DIGITS.decode([i]) for i in DIGITS("1234").input_ids] == ["1", "2", "3", "4"]


def test_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no text"):
        fit_tokenizer([], SMALL)
    with pytest.raises(ValueError, match="no text"):
        fit_tokenizer([""], SMALL)


def test_the_folder_is_an_ordinary_one(tmp_path: Path) -> None:
    make_tiny_policy(TEXTS, tmp_path / "policy", SMALL, seed=3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["tie_word_embeddings"] is True
    assert tokenizer("Nothing happens.").input_ids == TOKENIZER("Nothing happens.").input_ids
    assert model.config.vocab_size == len(tokenizer) and model.config.eos_token_id == tokenizer.eos_token_id
    ids = torch.tensor([tokenizer("go to shelf 1").input_ids])
    new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert new.shape[1] > ids.shape[1]


def test_the_default_has_about_a_million_parameters(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_policy(TEXTS, tmp_path))
    assert 800_000 < model.num_parameters() < 1_000_000


def test_the_seed_and_the_texts_make_the_files_and_nothing_else_does(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    first = make_tiny_policy(TEXTS, tmp_path / "a", SMALL, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    again = make_tiny_policy(TEXTS, tmp_path / "b", SMALL, seed=1)
    other = make_tiny_policy(TEXTS, tmp_path / "c", SMALL, seed=2)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (first / name).read_bytes() == (again / name).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert (first / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


def test_the_template_marks_roles_and_only_what_the_policy_says_counts_as_its_own() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "You are here."},
        {"role": "assistant", "content": "look"},
        {"role": "user", "content": "Nothing happens."},
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Be brief.<|user|>You are here.<|assistant|>look<|end|>Nothing happens.<|assistant|>"
    encoded = TOKENIZER.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    own = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert TOKENIZER.decode(own) == "look<|end|>"


def test_two_observations_in_a_row_stay_apart() -> None:
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    assert TOKENIZER.apply_chat_template(messages, tokenize=False) == "<|user|>one<|user|>two"
