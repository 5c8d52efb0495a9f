"""Tokenisation is pinned: what a model reads is what it was trained on."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest
import tokenizers
import transformers
import transformers.modeling_gguf_pytorch_utils as transformers_gguf

from engine.core.errors import InvalidRequest, ModelError
from engine.core.models.gguf_file import GGUFFile
from engine.core.models.gguf_tokenizer import build_tokenizer
from engine.core.models.source import ModelSource, resolve
from engine.core.models.tokenizer import Tokenizer, TokenizerSettings, load_tokenizer

# Text, the pieces that the smollm rules cut it into (numbers one by one, then GPT-2's words), and the token ids.
SMOLLM = [
    ("=   5", ["=", "   ", "5"], [45, 333, 37]),
    ("①", ["①"], [173, 235, 250]),
    ("1234567", list("1234567"), [33, 34, 35, 36, 37, 38, 39]),
    ("x = 12", ["x", " =", " ", "1", "2"], [104, 446, 216, 33, 34]),
    ("it's 2024's", ["it", "'s", " ", "2", "0", "2", "4", "'s"], [269, 506, 216, 34, 32, 34, 36, 506]),
    ("½²", ["½", "²"], [16738, 19133]),
    ("١٢", ["١", "٢"], [164, 111, 164, 112]),
    ("a  b", ["a", " ", " b"], [81, 216, 278]),
    ("\t\tif x:", ["\t", "\t", "if", " x", ":"], [197, 197, 342, 1792, 42]),
    (" \n\n  a", [" \n\n ", " a"], [216, 8866, 253]),
    ("👋🏽", ["👋🏽"], [10813, 235, 229, 10813, 233, 138]),
    ("你好，世界", ["你好", "，", "世界"], [18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230]),
]


def by_the_rules(pieces: list[str], source: ModelSource, letters: dict[str, int]) -> list[int]:
    """Byte-pair encoding as in the textbook: merge the best-ranked neighbours until none is left."""
    with GGUFFile(source.path) as file:
        meta = file.metadata
    ids = {token: number for number, token in enumerate(meta["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): number for number, merge in enumerate(meta["tokenizer.ggml.merges"])}
    letter_of = {byte: letter for letter, byte in letters.items()}
    result = []
    for piece in pieces:
        parts = [letter_of[byte] for byte in piece.encode()]
        while len(parts) > 1:
            rank, at = min((ranks.get((a, b), 10**9), at) for at, (a, b) in enumerate(itertools.pairwise(parts)))
            if rank == 10**9:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        result += [ids[part] for part in parts]
    return result


@pytest.mark.model
@pytest.mark.parametrize(("text", "pieces", "ids"), SMOLLM)
def test_smollm_tokens_are_those_of_its_rules(
    text: str,
    pieces: list[str],
    ids: list[int],
    smollm: Tokenizer,
    default_source: ModelSource,
    letters: dict[str, int],
) -> None:
    assert "".join(pieces) == text
    assert smollm.encode(text) == ids == by_the_rules(pieces, default_source, letters)
    assert smollm.decode(ids) == text


@pytest.mark.model
def test_transformers_reading_of_gguf_is_not_used(default_source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes half a minute and does not split digits."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("transformers' GGUF path was taken")

    monkeypatch.setattr(transformers_gguf, "load_gguf_checkpoint", refuse)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    assert load_tokenizer(default_source).encode("42") == [36, 34]


@pytest.mark.model
def test_smollm_marks(smollm: Tokenizer) -> None:
    assert smollm.encode("<|im_end|>hi") == [2, 6004]  # no automatic bos, marks in prompts are parsed
    assert smollm.decode([1, 6004, 2]) == "hi"
    assert smollm.decode([1, 6004, 2], skip_special=False) == "<|im_start|>hi<|im_end|>"
    assert (smollm.bos_id, smollm.eos_ids, smollm.vocab_size) == (1, {2}, 49152)
    assert smollm.special_ids == set(range(17))


@pytest.mark.model
def test_smollm_chat(smollm: Tokenizer) -> None:
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    user = [{"role": "user", "content": "Hi"}]
    assert smollm.render_chat(user) == f"{system}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert smollm.render_chat(user, add_generation_prompt=False).endswith("Hi<|im_end|>\n")
    own = [{"role": "system", "content": "Be brief"}, *user]
    assert smollm.render_chat(own).startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\n")


@pytest.mark.model
def test_one_tokenizer_serves_many_threads(smollm: Tokenizer) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        for step in range(50):
            text = f"thread {number} at {step}: é 你好"
            if smollm.decode(smollm.encode(text)) != text or text not in smollm.render_chat(
                [{"role": "u", "content": text}]
            ):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def header(letters: dict[str, int], pre: str, words: tuple[str, ...] = (), **extra: object) -> dict[str, object]:
    """A GGUF header with one token a byte, merges that build ``words`` from the left, and two marks."""
    letter_of = {byte: letter for letter, byte in letters.items()}
    tokens = [letter_of[byte] for byte in range(256)]
    merges: list[str] = []
    for word in words:
        parts = [letter_of[byte] for byte in word.encode()]
        for end in range(1, len(parts)):
            left, right = "".join(parts[:end]), parts[end]
            if left + right not in tokens:
                merges.append(f"{left} {right}")
                tokens.append(left + right)
    types = [1] * len(tokens) + [3, 4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<end>", "<tool>"],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": types,
        **extra,
    }


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab 123!", ["ab", " 123", "!"]),
        ("smollm", "ab 123!", ["ab", " ", "1", "2", "3", "!"]),
        ("llama-bpe", "ab 12345!", ["ab", " ", "123", "45", "!"]),
        ("llama-bpe", "I'LL go", ["I", "'LL", " go"]),
        ("qwen2", "ab 123!", ["ab", " ", "1", "2", "3", "!"]),
        ("qwen2", "a\n\n b", ["a", "\n\n", " b"]),
    ],
)
def test_pre_tokenizers_cut_where_their_rules_say(
    pre: str, text: str, pieces: list[str], letters: dict[str, int]
) -> None:
    backend = build_tokenizer(header(letters, pre))
    assert backend.pre_tokenizer is not None
    cut = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [bytes(letters[letter] for letter in piece).decode() for piece in cut] == pieces


def test_llama3_takes_whole_words_past_its_merges(letters: dict[str, int]) -> None:
    values = header(letters, "llama-bpe", words=("cat",))
    values["tokenizer.ggml.merges"] = []  # the word is in the vocabulary, but no merge leads to it
    backend = build_tokenizer(values)
    assert backend.encode("cat").ids == [backend.token_to_id("cat")]
    values["tokenizer.ggml.pre"] = "gpt-2"
    assert len(build_tokenizer(values).encode("cat").ids) == 3


def test_marks_of_a_gguf_header(letters: dict[str, int]) -> None:
    backend = build_tokenizer(header(letters, "gpt-2"))
    end, tool = backend.token_to_id("<end>"), backend.token_to_id("<tool>")
    assert backend.encode("a<end><tool>").ids == [ord("a"), end, tool]
    assert backend.decode([ord("a"), end, tool]) == "a<tool>"  # control tokens are hidden, user-defined ones are text


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"tokenizer.ggml.pre": "smolm"}, "did you mean 'smollm'"),
        ({"tokenizer.ggml.pre": "default"}, "'default' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama' is not supported"),
    ],
)
def test_tokenizers_that_are_not_known_are_refused_by_name(
    extra: dict[str, object], words: str, letters: dict[str, int]
) -> None:
    with pytest.raises(ModelError, match=words):
        build_tokenizer(header(letters, "gpt-2", **extra))


def test_a_hf_directory(hf_directory: Path) -> None:
    tokenizer = load_tokenizer(resolve(str(hf_directory)))
    bos, eos = tokenizer.encode("<s></s>")
    assert tokenizer.encode("hi") == [bos, ord("h"), ord("i")]  # add_bos_token
    assert tokenizer.eos_ids == {7, 8, eos}  # configs and tokenizer together
    assert tokenizer.bos_id == bos
    chat = tokenizer.render_chat([{"role": "user", "content": "yo"}])
    assert chat == "<s>[user]yo"
    assert tokenizer.encode(chat).count(bos) == 1  # the template brought it along


def test_a_post_processor_decides_about_bos_where_the_config_does_not(
    hf_directory: Path, backend: tokenizers.Tokenizer
) -> None:
    number = backend.token_to_id("<s>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    backend.save(str(hf_directory / "tokenizer.json"))
    settings = json.loads((hf_directory / "tokenizer_config.json").read_text())
    del settings["add_bos_token"]
    (hf_directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(resolve(str(hf_directory)))
    assert tokenizer.encode("a") == tokenizer.encode("<s>a") == [number, ord("a")]


def test_a_template_file_goes_before_the_config(hf_directory: Path) -> None:
    (hf_directory / "chat_template.jinja").write_text("file:{{ messages[0].content }}")
    tokenizer = load_tokenizer(resolve(str(hf_directory)))
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "file:x"


def test_broken_or_missing_tokenizer_files_are_model_errors(hf_directory: Path) -> None:
    (hf_directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(resolve(str(hf_directory)))
    (hf_directory / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(resolve(str(hf_directory)))


def test_truncation_settings_of_a_tokenizer_file_are_ignored(backend: tokenizers.Tokenizer) -> None:
    backend.enable_truncation(2)
    assert len(Tokenizer(backend).encode("long text")) == 9


def test_text_that_is_not_unicode_is_refused(bytewise: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="prompt: is not valid Unicode"):
        bytewise.encode("a\ud800")


def test_chat_without_a_template_is_refused(bytewise: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="messages: this model has no chat template"):
        bytewise.render_chat([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_compile_is_a_model_error(backend: tokenizers.Tokenizer) -> None:
    with pytest.raises(ModelError, match="does not compile"):
        Tokenizer(backend, TokenizerSettings(chat_template="{% if %}"))
