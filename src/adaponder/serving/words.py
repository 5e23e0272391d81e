"""``/tokenize`` and ``/detokenize``: from text to tokens and back, without the model."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from adaponder.serving.bodies import read_body
from adaponder.serving.context import Context
from adaponder.serving.errors import ApiError
from adaponder.serving.protocol import DetokenizeBody, TokenizeBody
from adaponder.serving.requests import beside
from adaponder.serving.served import Served
from adaponder.text import pieces


async def tokenize(context: Context, request: HttpRequest) -> Response:
    """The tokens of a text, which may be more than the model has positions, or none."""
    body = await read_body(request, TokenizeBody, context.limits)
    most = context.limits.prompt_characters
    if len(body.prompt) > most:
        raise ApiError(400, f"prompt: at most {most:,} characters are taken", param="prompt")
    return await beside(len(body.prompt), _tokens, body, context.served)


async def detokenize(context: Context, request: HttpRequest) -> Response:
    """The text of tokens."""
    body = await read_body(request, DetokenizeBody, context.limits)
    return await beside(len(body.tokens), _text, body, context.served)


def _tokens(body: TokenizeBody, served: Served) -> Response:
    ids: list[int] = []
    if body.prompt:
        ids = list(served.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens, verbose=False).input_ids)
    texts = pieces(served.tokenizer, ids)
    tokens = [{"id": token, "text": text} for token, text in zip(ids, texts, strict=True)]
    return JSONResponse({"tokens": tokens, "count": len(ids)})


def _text(body: DetokenizeBody, served: Served) -> Response:
    if body.tokens and max(body.tokens) >= served.vocabulary:
        last = served.vocabulary - 1
        raise ApiError(400, f"tokens: {max(body.tokens)} is no token id; they go from 0 to {last}", param="tokens")
    return JSONResponse({"prompt": "".join(pieces(served.tokenizer, body.tokens))})
