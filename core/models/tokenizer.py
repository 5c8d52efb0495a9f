"""Text to token ids and back, without torch: the frontend's process loads this and not the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from engine.core.errors import InvalidRequest, ModelError
from engine.core.models import gguf_llama, hf_dir
from engine.core.models.chat import ChatTemplate
from engine.core.models.gguf_file import GGUFFile
from engine.core.models.gguf_tokenizer import build_tokenizer
from engine.core.models.pieces import Pieces
from engine.core.models.source import ModelSource

MANY_IDS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """What a model says of its tokenizer besides the vocabulary.

    ``add_bos``: put the beginning-of-sequence token before every prompt; ``None`` leaves it to the tokenizer file's own
    post-processor.
    """

    eos_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    add_bos: bool | None = False
    chat_template: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)  # for the template: bos_token, eos_token, …


class Tokenizer:
    """One model's tokenizer and chat template. Thread-safe: nothing changes after construction, but for
    what is remembered of tokens.

    Attributes:
        bos_id: beginning of sequence, if the model has one.
        eos_ids: tokens that end a generation.
        special_ids: tokens that are marks and not text.
        vocab_size: number of token ids, marks included.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings | None = None) -> None:
        settings = settings or TokenizerSettings()
        backend.no_truncation()  # some tokenizer files carry the limits of their training
        backend.no_padding()
        self._backend = backend
        self._add_bos = settings.add_bos
        self.bos_id = settings.bos_id
        self.eos_ids = settings.eos_ids
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._added = {number: token.content for number, token in added.items()}
        self._pieces = Pieces(backend)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        source = settings.chat_template
        self._template = None if source is None else ChatTemplate(source, settings.variables)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a prompt. Marks such as ``<|im_end|>`` in the text become their tokens.

        A beginning-of-sequence token comes first if the model wants one and the text does not bring it along (unless
        ``add_special`` is false). Raises ``InvalidRequest`` for text that is not Unicode (a lone surrogate).
        """
        marks = add_special and self._add_bos is None
        try:
            # The batch form lets go of the interpreter lock: a long text must not freeze a process that serves others.
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=marks)[0].ids
        except TypeError as error:
            raise InvalidRequest("prompt", f"is not valid Unicode text ({error})") from error
        bos = self.bos_id
        if bos is None or not add_special:
            return ids
        if self._add_bos and ids[:1] != [bos]:
            return [bos, *ids]
        if self._add_bos is None and ids[:2] == [bos, bos]:  # a rendered chat brings its own
            return ids[1:]
        return ids

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to the text, as bytes: a part of a character has no text of its own. An unknown id adds
        nothing; a mark adds its name. The space that some decoders leave out at the beginning of a text is there."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes_of(token)
            if known:  # so there are no more than tokens
                self._bytes[token] = known
        return known

    def _bytes_of(self, token: int) -> bytes:
        if token in self.special_ids or token in self._added:
            return self._added.get(token, "").encode()
        piece = self._backend.id_to_token(token)
        return b"" if piece is None else self._pieces.bytes_of(piece)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids. Bytes that are not UTF-8 show as replacement marks; unknown ids as nothing."""
        if len(ids) > MANY_IDS:  # the batch form lets go of the interpreter lock
            return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def is_special(self, text: str) -> bool:
        """Whether a text is the name of a mark, which may be left out of the text."""
        return any(self._added.get(number) == text for number in self.special_ids)

    @property
    def takes_tools(self) -> bool:
        """Whether the model's chat template knows tools."""
        return self._template is not None and self._template.takes_tools

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """A conversation as prompt text, by the model's chat template (see ``ChatTemplate.render``).

        Raises:
            InvalidRequest: no template, malformed messages, or ones that the template refuses.
        """
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template: send a plain prompt (completions)")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **extra)


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Read a model's tokenizer: from the GGUF header, or from a Hugging Face directory. Raises ``ModelError``."""
    return _from_gguf(source.path) if source.kind == "gguf" else _from_directory(source.path)


def _from_gguf(path: Path) -> Tokenizer:
    with GGUFFile(path) as file:
        meta = file.metadata
        eos_ids = gguf_llama.eos_ids(file)
    tokens: list[str] = meta.get("tokenizer.ggml.tokens", [])
    ids = {name: meta.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_MARKS.items()}
    settings = TokenizerSettings(
        eos_ids=eos_ids,
        bos_id=ids["bos_token"],
        add_bos=bool(meta.get("tokenizer.ggml.add_bos_token", meta.get("tokenizer.ggml.pre") == "llama-bpe")),
        chat_template=meta.get("tokenizer.chat_template"),
        variables={name: tokens[number] for name, number in ids.items() if number is not None},
    )
    return Tokenizer(build_tokenizer(meta), settings)


_GGUF_MARKS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def _from_directory(path: Path) -> Tokenizer:
    config = hf_dir.read_json(path / "tokenizer_config.json")
    file = path / "tokenizer.json"
    backend = _read_backend(file) if file.is_file() else _through_transformers(path)
    marks = {name: text for name in _GGUF_MARKS if (text := hf_dir.token_text(config.get(name))) is not None}
    bos = backend.token_to_id(marks["bos_token"]) if "bos_token" in marks else None
    if bos is None:
        number = hf_dir.read_json(path / "config.json").get("bos_token_id")
        bos = number if isinstance(number, int) else None
    wanted = config.get("add_bos_token")
    settings = TokenizerSettings(
        eos_ids=hf_dir.eos_ids(path),
        bos_id=bos,
        add_bos=wanted if isinstance(wanted, bool) else None,
        chat_template=hf_dir.chat_template(path, config),
        variables=marks,
    )
    return Tokenizer(backend, settings)


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file}: not a tokenizer that can be read: {error}") from error


def _through_transformers(path: Path) -> tokenizers.Tokenizer:
    """For directories that only have the files of an older tokenizer: transformers converts them, slowly."""
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # conversions fail in many ways; all mean that there is no tokenizer
        raise ModelError(f"{path} has no tokenizer.json, and transformers finds no other tokenizer: {error}") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{path} has no tokenizer.json, and its tokenizer cannot be converted to one")
    return backend
