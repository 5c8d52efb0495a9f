"""The tokenizer inside a GGUF file, rebuilt on the ``tokenizers`` library.

The file names its pre-tokenizer (``tokenizer.ggml.pre``); the rules behind each name are llama.cpp's. transformers' own
GGUF path ignores that name, so it does not split digits where a model was trained on single digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.core.errors import ModelError, suggest

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # ggml token types that are matched in text as a whole

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Every digit (any Unicode number, ``①`` too) alone, then GPT-2's words."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_LLAMA3, _QWEN2 = "llama-bpe", "qwen2"
PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    _LLAMA3: _words("{1,3}"),
    _QWEN2: _words(""),
}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF header describes: byte-level BPE, special tokens known. Does not mutate.

    Raises:
        ModelError: another kind of tokenizer, or a pre-tokenizer whose rules are not known here.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"GGUF tokenizer model {kind!r} is not supported (byte-level BPE, 'gpt2', is)")
    pre = str(metadata.get("tokenizer.ggml.pre", "missing"))
    if pre not in PRE_TOKENIZERS:
        raise ModelError(f"GGUF pre-tokenizer {pre!r} is not supported: {suggest(pre, PRE_TOKENIZERS)}")
    try:
        tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
        types = metadata["tokenizer.ggml.token_type"]
    except KeyError as error:
        raise ModelError(f"the GGUF header lacks {error}") from error
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocab = {token: number for number, token in enumerate(tokens)}
    # Llama 3's merges do not reach every token: words that are in the vocabulary as a whole are taken as they are.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == _LLAMA3))
    if pre == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    whole = {_UNKNOWN: True, _CONTROL: True, _USER_DEFINED: False}
    marked = [(token, whole[kind]) for token, kind in zip(tokens, types, strict=True) if kind in whole]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, on in marked if on])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token, on in marked if not on])
    return tokenizer
