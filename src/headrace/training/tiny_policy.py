"""A decoder of about a million parameters, with a tokenizer fitted to one world's text, as an ordinary Hugging Face folder.

Nothing here is special at use: ``AutoModelForCausalLM`` and ``AutoTokenizer`` load the folder like any other. The architecture is
Qwen3's: its normalized queries and keys bear the high learning rates that make a short cold start possible.

The tokenizer is a ``tokenizers`` Unigram model over byte-level characters. Its pieces are whole words with their leading
space, numbers, and multi-word phrases of fixed wording ("Nothing happens.", " is closed."); all 256 bytes are pieces
too, so every text encodes and decodes back to itself. Every piece costs the same, which makes the segmentation the one
with the fewest tokens.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from headrace.training.pretrained import no_progress_bars

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
CONTROL_TOKENS = (PAD, SYSTEM, USER, ASSISTANT, END)

# An observation that follows an action needs no marker of its own: the action's end token already separates them.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{%- elif message['role'] == 'system' -%}"
    "<|system|>{{ message['content'] }}"
    "{%- else -%}"
    "{%- if loop.first or loop.previtem['role'] != 'assistant' -%}<|user|>{%- endif -%}"
    "{{ message['content'] }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)

_WORDS = re.compile(r" ?[A-Za-z]+| ?\d+|[^A-Za-z0-9]")
_WORDS_AND_DIGITS = re.compile(r" ?[A-Za-z]+|\d|[^A-Za-z0-9]")
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@dataclass(frozen=True, slots=True)
class TinySizes:
    """The decoder's sizes and the tokenizer's limits; the defaults give about 0.85 million parameters.

    ``words`` and ``phrases`` bound the vocabulary beside the 256 bytes and 5 control tokens; a word must occur
    ``min_count`` times in the texts. ``split_digits`` makes every digit its own token (arithmetic); without it a
    frequent number is one token (object names).
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 384
    context: int = 2048
    words: int = 600
    phrases: int = 120
    min_count: int = 2
    split_digits: bool = False


def make_tiny_policy(texts: Iterable[str], folder: str | Path, sizes: TinySizes | None = None, seed: int = 0) -> Path:
    """Fit a tokenizer to ``texts``, draw weights from ``seed`` and save both in ``folder``; returns the folder.

    The same texts (order included), sizes and seed give the same files. The global random state is left as it was.
    """
    sizes = sizes or TinySizes()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = fit_tokenizer(texts, sizes)
    tokenizer.save_pretrained(folder)
    model = new_model(tokenizer, sizes, seed)
    with no_progress_bars():
        model.save_pretrained(folder)
    return folder


def new_model(tokenizer: PreTrainedTokenizerFast, sizes: TinySizes, seed: int) -> Qwen3ForCausalLM:
    """A fresh float32 decoder whose weights depend on ``sizes``, the vocabulary's length and ``seed`` only."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=sizes.width,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.width // sizes.heads,
        max_position_embeddings=sizes.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Qwen3ForCausalLM = Qwen3ForCausalLM(config)
    return model


def fit_tokenizer(texts: Iterable[str], sizes: TinySizes) -> PreTrainedTokenizerFast:
    """The tokenizer of ``make_tiny_policy``; ``ValueError`` where there is no text to fit it to."""
    pieces = [*sorted(_BYTES.alphabet()), *(_byte_level(piece) for piece in fit_pieces(texts, sizes))]
    # Equal costs: the fewest tokens win. The small slope lets the more frequent piece win between segmentations of equal length.
    scored = [(piece, -1.0 - 1e-4 * rank) for rank, piece in enumerate(dict.fromkeys(pieces))]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=None, byte_fallback=False))
    tokenizer.pre_tokenizer = _BYTES
    tokenizer.decoder = decoders.ByteLevel()
    # Control tokens stay outside the model's own pieces: text that spells one can then be encoded as plain bytes.
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    build: Any = PreTrainedTokenizerFast  # transformers leaves its constructor untyped
    fast: PreTrainedTokenizerFast = build(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False, model_max_length=sizes.context
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def fit_pieces(texts: Iterable[str], sizes: TinySizes) -> list[str]:
    """The words, numbers and phrases worth a token of their own, most frequent first.

    A word needs ``sizes.min_count`` occurrences. Phrases grow pair by pair, the most frequent pair next, but only from pairs
    of fixed wording (``_is_fixed_wording``): "You arrive at" becomes one token, while an object's name, which varies after
    "a", stays a token of its own wherever it stands. Numbers never join a phrase, and a phrase that no text uses in the end
    is left out.
    """
    pattern = _WORDS_AND_DIGITS if sizes.split_digits else _WORDS
    occurrences: Counter[str] = Counter()
    stretches: Counter[tuple[str, ...]] = Counter()  # what stands between two numbers; few of these differ
    for text, count in Counter(texts).items():
        words = pattern.findall(text)
        for word in words:
            occurrences[word] += count
        for is_number, stretch in itertools.groupby(words, key=_is_number):
            if not is_number:
                stretches[tuple(stretch)] += count
    if not occurrences:
        raise ValueError("there is no text to fit a tokenizer to: give the world's observations and actions")
    words_kept = [word for word, count in _by_count(occurrences) if count >= sizes.min_count and len(word) > 1][: sizes.words]
    used = _grow_phrases(stretches, set(words_kept), sizes)
    for word in filter(_is_number, occurrences):
        used[word] = occurrences[word]
    phrases = [piece for piece, _ in _by_count(used) if _joins_words(piece, pattern)]
    return sorted([*words_kept, *phrases], key=lambda piece: (-used[piece], piece))


def _grow_phrases(stretches: Counter[tuple[str, ...]], words: set[str], sizes: TinySizes) -> Counter[str]:
    """How often each piece occurs after the phrases have grown."""
    known = set(words)
    for _ in range(sizes.phrases):
        pair = _best_pair(stretches, known, sizes.min_count)
        if pair is None:
            break
        known.add("".join(pair))
        joined: Counter[tuple[str, ...]] = Counter()
        for stretch, count in stretches.items():
            joined[_join(stretch, pair)] += count
        stretches = joined
    used: Counter[str] = Counter()
    for stretch, count in stretches.items():
        for piece in stretch:
            used[piece] += count
    return used


def _best_pair(stretches: Counter[tuple[str, ...]], known: set[str], min_count: int) -> tuple[str, str] | None:
    pairs: Counter[tuple[str, str]] = Counter()
    pieces: Counter[str] = Counter()
    for stretch, count in stretches.items():
        for piece in stretch:
            pieces[piece] += count
        for pair in itertools.pairwise(stretch):
            pairs[pair] += count
    for (left, right), count in sorted(pairs.items(), key=lambda item: (-item[1], item[0])):
        if count < min_count:
            return None
        known_halves = all(half in known or len(half) == 1 for half in (left, right))
        if known_halves and _is_fixed_wording(left, right, count / pieces[left], count / pieces[right]):
            return left, right
    return None


def _is_fixed_wording(left: str, right: str, share_of_left: float, share_of_right: float) -> bool:
    """Whether two pieces belong together: one of them occurs mostly here, and the other often.

    Beside a punctuation mark, which stands everywhere, a lower share is enough.
    """
    mark = any(len(half) == 1 and not half.isalnum() for half in (left, right))
    return max(share_of_left, share_of_right) >= 0.5 and min(share_of_left, share_of_right) >= (0.05 if mark else 0.25)


def _is_number(word: str) -> bool:
    return word[-1].isdigit()


def _joins_words(piece: str, pattern: re.Pattern[str]) -> bool:
    return len(pattern.findall(piece)) > 1


def _join(stretch: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    joined: list[str] = []
    for piece in stretch:
        if joined and (joined[-1], piece) == pair:
            joined[-1] += piece
        else:
            joined.append(piece)
    return tuple(joined)


def _by_count(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _byte_level(text: str) -> str:
    """``text`` in the byte-level alphabet, in which the tokenizer's pieces are written."""
    return "".join(piece for piece, _ in _BYTES.pre_tokenize_str(text))
