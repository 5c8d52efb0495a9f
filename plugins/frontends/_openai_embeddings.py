"""``/v1/embeddings``: what clients may send, and what they get back."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import msgspec
from pydantic import Field
from starlette.responses import Response

from engine.core.errors import InvalidRequest
from engine.core.outputs import Embedding
from engine.core.pooling import Pooling, PoolingKind
from engine.plugins.frontends._aside import Aside
from engine.plugins.frontends._openai_fields import UNSUPPORTED
from engine.plugins.frontends._openai_schema import Asked, in_one_shape
from engine.plugins.frontends._wire import to_json

LARGE_ANSWER = 2**16  # numbers; more are written in a thread, so that the event loop stays quick
FIELDS = {"prompt": "input", "n": "input"}


class EmbeddingRequest(Asked):
    """``POST /v1/embeddings``."""

    input: Any = Field(description="text, a list of texts, token ids, or a list of lists of token ids")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="numbers (the default), or the base64 text of float32 numbers, little-endian"
    )
    dimensions: int | None = Field(None, description="must be the model's own number: embeddings are not cut")
    pooling: PoolingKind | None = Field(
        None, description="last: the last token's hidden state (the default); mean: the mean of all tokens'"
    )
    normalize: bool | None = Field(None, description="of length 1 (default true)")

    def inputs(self) -> list[str | list[int]]:
        """The input in any of its four shapes, as a list. Raises ``InvalidRequest``."""
        return in_one_shape("input", self.input)

    def pools(self) -> Pooling:
        """How."""
        return Pooling(kind=self.pooling or "last", normalize=self.normalize is not False)

    def check_dimensions(self, width: int) -> None:
        """Raise ``InvalidRequest`` where it is another number than embeddings have here."""
        if self.dimensions is not None and self.dimensions != width:
            words = f"is {self.dimensions}: embeddings of this model have {width} numbers, and are not cut"
            raise InvalidRequest("dimensions", words, code=UNSUPPORTED)


@contextmanager
def told_of_input() -> Iterator[None]:
    """Inside, what is wrong with a prompt is wrong with ``input``."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(FIELDS.get(error.field, error.field), error.message, code=error.code) from error


async def answer(
    model: str, wish: EmbeddingRequest, embeddings: Sequence[Embedding], aside: Aside, *, headers: dict[str, str]
) -> Response:
    """The whole answer; in a thread where writing it takes a while."""
    write = partial(written, model, wish, embeddings)
    large = sum(len(one.data) for one in embeddings) > 4 * LARGE_ANSWER
    body = await aside.run(write) if large else write()
    return Response(body, headers=headers, media_type="application/json")


def written(model: str, wish: EmbeddingRequest, embeddings: Sequence[Embedding]) -> bytes:
    """The answer, JSON. Written vector by vector, since Python's numbers take eight times the memory."""
    data = []
    for index, one in enumerate(embeddings):
        numbers = b64encode(one.data).decode() if wish.encoding_format == "base64" else one.vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": msgspec.Raw(to_json(numbers))})
    tokens = sum(one.prompt_tokens for one in embeddings)
    usage = {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in embeddings)},
    }
    return to_json({"object": "list", "data": data, "model": model, "usage": usage})
