"""Defines the bodies of requests as OpenAI documents them, with an ``adaponder`` extension, and OpenAI's errors.

OpenAI's fields that would have no effect here are accepted and ignored. Its unsupported fields must be absent or
``null``; otherwise the error says that they are not supported. Unknown fields are refused. :func:`bodies_for` adds the
limits of one server.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from adaponder.errors import AdaPonderError, EvaluationError, in_one_line
from adaponder.fields import LARGEST_INT, body_field
from adaponder.inference.request import MOST_STOP_IDS
from adaponder.serving.fairness import UnavailableError
from adaponder.serving.served import Served
from adaponder.serving.settings import Limits

_Body = TypeVar("_Body", bound=BaseModel)
Ignored = Annotated[str, Field(max_length=512, description="Has no effect.")]
Unsupported = Annotated[None, Field(description="Not supported: only null is accepted.")]
_UNSUPPORTED_IN_CHATS = ("audio", "function_call", "functions", "parallel_tool_calls", "prediction", "reasoning_effort")
_UNSUPPORTED_IN_CHATS += ("tool_choice", "tools", "verbosity", "web_search_options")
Never = Literal[False]
_Digits = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
_DIGITS_ONLY: Any = {"additionalProperties": False}  # in the schema of a dictionary whose keys are _Digits


class JsonBody(BaseModel):
    """A JSON object: types are not converted; unknown fields, NaN and infinity are refused."""

    # A length limit also makes pydantic refuse lone surrogates, which are not valid text.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, str_max_length=1 << 20)


class DepthControl(JsonBody):
    """Options for depth: at most one of policy, tau and budget; without them, the method's default policy decides."""

    policy: str | None = Field(None, max_length=400, description="A policy in one line, e.g. fixed:2 or entropy:2.5.")
    tau: Annotated[float | None, body_field("tau")] = None
    budget: float | str | None = None
    max_iterations: int | None = None
    depths: dict[str, int] | None = None
    gates: bool = Field(False, description="Return gates of each scored token, or of the one before each new token.")
    iteration_top: int = 0
    seed: Annotated[int | None, body_field("seed")] = None


class Generation(DepthControl):
    """Options of a completion that OpenAI's API does not have."""

    depth: bool = Field(False, description="Return depths: of each prompt token, and of the one before each new token.")
    top_k: Annotated[int, body_field("top_k")] = 0
    min_p: Annotated[float, body_field("min_p")] = 0.0
    repetition_penalty: Annotated[float, body_field("repetition_penalty")] = 1.0
    min_tokens: int = 0
    ignore_eos: Annotated[bool, body_field("ignore_eos")] = False

    @property
    def lists_tokens(self) -> bool:
        """Returns whether the answer lists tokens under ``adaponder.tokens``."""
        return self.depth or self.gates or self.iteration_top > 0


class StreamOptions(JsonBody):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="With include_usage: usage in every event.")
    include_obfuscation: Never | None = None


class GenerationBody(JsonBody):
    """Fields common to completions and chats: OpenAI's, and the additional fields of vLLM."""

    model: str
    frequency_penalty: Annotated[float | None, body_field("frequency_penalty")] = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    n: int | None = None
    presence_penalty: Annotated[float | None, body_field("presence_penalty")] = None
    seed: Annotated[int | None, body_field("seed")] = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, body_field("temperature", le=2)] = None  # OpenAI's range
    top_p: Annotated[float | None, body_field("top_p")] = None
    user: Ignored | None = None
    top_k: Annotated[int | None, body_field("top_k", ge=-1)] = None  # -1: all tokens, as in vLLM
    min_p: Annotated[float | None, body_field("min_p")] = None
    repetition_penalty: Annotated[float | None, body_field("repetition_penalty")] = None
    min_tokens: int | None = None
    ignore_eos: Annotated[bool | None, body_field("ignore_eos")] = None
    stop_token_ids: list[int] | None = None
    adaponder: Generation | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def extension(self) -> Generation:
        return self.adaponder or Generation()  # pyright: ignore[reportCallIssue]

    @property
    def samples(self) -> int:
        """Returns the number of completions to generate for each prompt; the answer has the ``n`` best."""
        return getattr(self, "best_of", None) or self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    """The body of ``POST /v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Unsupported = None

    @property
    def top(self) -> int | None:
        """Returns the number of likeliest tokens to list with each log-probability; ``None``: no log-probabilities."""
        return self.logprobs


class TextFormat(JsonBody):
    type: Literal["text"]


class TextPart(TextFormat):
    text: str


class ChatMessage(JsonBody):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=256)]
    name: str | None = Field(None, max_length=64)
    refusal: None = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tool_calls: Unsupported = None

    def as_dict(self) -> dict[str, str]:
        """Returns the message in the form that chat templates expect."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class ChatBody(GenerationBody):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16, description="Has no effect."
    )
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    prompt_cache_key: Ignored | None = None
    response_format: TextFormat | None = None
    safety_identifier: Ignored | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Never | None = None

    @property
    def top(self) -> int | None:
        """Returns the number of likeliest tokens to list with each log-probability; ``None``: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(JsonBody):
    """The body of ``POST /tokenize``."""

    prompt: str
    add_special_tokens: bool = True


class DetokenizeBody(JsonBody):
    """The body of ``POST /detokenize``."""

    tokens: list[int]


class ScoreBody(JsonBody):
    """The body of ``POST /score``."""

    prompt: str | list[int]
    model: str | None = None
    adaponder: DepthControl | None = None
    full_depth: bool = False

    @property
    def extension(self) -> DepthControl:
        return self.adaponder or DepthControl()  # pyright: ignore[reportCallIssue]


def bodies_for(served: Served, limits: Limits) -> dict[type[BaseModel], type[BaseModel]]:
    """Maps body classes to subclasses with the limits of this server and of its model."""
    count = _number(int, limits.max_tokens or served.tokens, ge=0, le=LARGEST_INT)
    token = _number(int, served.vocabulary - 1, ge=0, le=LARGEST_INT)
    ids: Any = Annotated[
        list[token], Field(min_length=1, fail_fast=True, json_schema_extra={"maxItems": served.tokens})
    ]
    characters: Any = {"maxLength": limits.prompt_characters}
    text: Any = Annotated[str, Field(json_schema_extra=characters | {"minLength": 1})]
    several = Field(min_length=1, max_length=limits.prompts, fail_fast=True)
    stop: Any = Annotated[str, Field(min_length=1, max_length=limits.stop_characters)]
    stop_ids: Any = Annotated[list[token], Field(max_length=MOST_STOP_IDS, fail_fast=True)]
    bias: Any = Annotated[float, Field(ge=-100, le=100)]
    biases: Any = Annotated[dict[_Digits, bias], Field(max_length=limits.logit_bias, json_schema_extra=_DIGITS_ONLY)]
    model: Any = Annotated[str, Field(max_length=512, json_schema_extra={"enum": [served.name]})]
    depth_fields = _depth_fields(served, limits)
    generation: Any = _limited(Generation, **depth_fields, min_tokens=(count, 0))
    control: Any = _limited(DepthControl, **depth_fields)
    common: dict[str, Any] = {
        "model": (model, ...),
        "logit_bias": (biases | None, None),
        "max_tokens": (count | None, None),
        "n": _up_to("samples", limits.n),
        "stop": (stop | Annotated[list[stop], Field(max_length=limits.stops, fail_fast=True)] | None, None),
        "min_tokens": (count | None, None),
        "stop_token_ids": (stop_ids | None, None),
        "adaponder": (generation | None, None),
    }
    prompt = text | ids | Annotated[list[text], several] | Annotated[list[ids], several]
    messages: Any = Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.messages)]
    limited: dict[type[BaseModel], dict[str, Any]] = {
        CompletionBody: common
        | {
            "prompt": (prompt, ...),
            "best_of": _up_to("samples", limits.best_of),
            "logprobs": _up_to("log_probabilities", limits.logprobs),
        },
        ChatBody: common
        | {
            "messages": (messages, ...),
            "top_logprobs": _up_to("log_probabilities", limits.logprobs),
            "max_completion_tokens": (count | None, None),
        }
        | dict.fromkeys(_UNSUPPORTED_IN_CHATS, (Unsupported, None)),
        TokenizeBody: {"prompt": (Annotated[str, Field(json_schema_extra=characters)], ...)},
        DetokenizeBody: {"tokens": (Annotated[list[token], Field(fail_fast=True)], ...)},
        ScoreBody: {"prompt": (text | ids, ...), "model": (model | None, None), "adaponder": (control | None, None)},
    }
    return {body: _limited(body, **fields) for body, fields in limited.items()}


def _depth_fields(served: Served, limits: Limits) -> dict[str, Any]:
    """Returns the fields of :class:`DepthControl` whose limits depend on the server or its model."""
    depth = _number(int, served.iterations, ge=1, le=1000)
    mean_depth = _number(float, served.iterations, ge=1, le=1000)
    depths: Any = Annotated[dict[_Digits, depth], Field(max_length=65536, json_schema_extra=_DIGITS_ONLY)]
    profiles: Any = {"enum": [*served.profiles]} if served.profiles else None
    profile: Any = Annotated[str, Field(min_length=1, max_length=64, json_schema_extra=profiles)]
    words = "|".join(served.facts()["policies"])
    spelling: Any = {"pattern": rf"^({words}):[0-9.,e+@-]+$"} if words else None
    policy: Any = Annotated[str, Field(max_length=400, json_schema_extra=spelling)]
    return {
        "policy": (policy | None, Field(None, description=DepthControl.model_fields["policy"].description)),
        "budget": (mean_depth | profile | None, Field(None, description="A profile by name, or a mean depth.")),
        "max_iterations": _up_to("max_iterations", served.iterations),
        "depths": (depths | None, Field(None, description="Forced depth by slot: a token's index in its sequence.")),
        "iteration_top": _up_to("iteration_top", limits.logprobs, 0),
    }


def _number(kind: type, maximum: float, **checked: Any) -> Any:
    """Returns the type of a number with the pydantic constraints ``checked``.

    ``maximum`` is only written to the schema, because the routes check it with clearer errors.
    """
    return Annotated[kind, Field(**checked, json_schema_extra={"maximum": maximum})]


def _up_to(name: str, most: int, default: Any = None) -> tuple[Any, Any]:
    """Returns the type and default of an integer of at most ``most``; ``name`` is its name in an engine request."""
    return Annotated[int | None if default is None else int, body_field(name, le=most)], default


def _limited(body: type[_Body], **fields: Any) -> type[_Body]:
    """Returns a subclass of ``body`` in which ``fields`` are added or replaced."""
    return create_model(body.__name__, __base__=body, __doc__=body.__doc__, **fields)


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# Maps fields of an engine request to their names in a body, if the two differ.
_FIELDS = {name: f"adaponder.{name}" for name in Generation.model_fields.keys() - GenerationBody.model_fields.keys()}
_FIELDS |= {"max_new_tokens": "max_tokens", "log_probabilities": "logprobs", "samples": "n"}
_FIELDS |= {"min_new_tokens": "min_tokens", "stop_ids": "stop_token_ids"}
_HTTP_ERRORS = {
    400: "the body is not valid JSON: it is nested too deeply, or holds bytes or numbers that cannot be read",
    404: "there is no such route",
    405: "this route does not take this method",
}
_UNSHOWABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class ErrorText(BaseModel):
    """Message, type and code of an error, and the field that caused it."""

    model_config = ConfigDict(title="Error")
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Body of every answer that is an error."""

    error: ErrorText


class ApiError(Exception):
    """An error to send to the client; ``param`` is the field that caused it, ``code`` a machine-readable name."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Any = None
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def response(self) -> JSONResponse:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = _UNSHOWABLE.sub("\ufffd", str(self))
        error = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, status_code=self.status, headers=self.headers)


def as_api_error(problem: BaseException) -> ApiError:
    """Converts an exception of a route, a completion or a score to the error that is sent to the client."""
    if isinstance(problem, ApiError):
        return problem
    if isinstance(problem, RequestValidationError):
        return _invalid_body(problem.errors())
    if isinstance(problem, HTTPException):
        message = _HTTP_ERRORS.get(problem.status_code) or str(problem.detail)
        return ApiError(problem.status_code, message, headers=problem.headers)
    if isinstance(problem, UnavailableError):
        return ApiError(503, str(problem), code="unavailable")
    if isinstance(problem, EvaluationError):
        return ApiError(500, str(problem), code="generation_failed")
    if isinstance(problem, AdaPonderError):
        return _refused(problem)
    return ApiError(500, "the server failed to answer; see its log", code="internal")


def _refused(problem: AdaPonderError) -> ApiError:
    """Converts an error about an engine request to a 400 that uses the body's field names."""

    def body_name(match: re.Match[str]) -> str:
        return _FIELDS.get(match[0], match[0]).removeprefix("adaponder.")

    message = in_one_line(problem).replace("--policy ", "policy=")
    field = re.match(r"[a-z_.]+(?=[=:\[ ])", message)
    param = None if field is None else _FIELDS.get(field[0], field[0])
    # Types and ranges were checked before, so the prompt or the completion is too long for the context.
    code = "context_length_exceeded" if param in ("prompt", "max_tokens") else None
    return ApiError(400, re.sub(r"^[a-z_.]+(?=[=:\[ ])|[a-z_]+(?==)", body_name, message), param=param, code=code)


def _invalid_body(errors: Sequence[Any]) -> ApiError:
    """Converts pydantic's errors about a body to a 400 that reports one of them.

    For a field that may have several types, pydantic lists an error per type. Errors about values come before errors
    about types, and within each group the error in the most deeply nested field comes first.
    """
    error = max(errors, key=lambda error: (not error["type"].endswith("_type"), len(error["loc"])))
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {error['ctx']['error']}")
    # Leaves out parts of the location that name a type of a union, such as ``str`` or ``list[int]``.
    place = [str(part) for part in error["loc"][1:] if re.fullmatch(r"(?!(str|int|float|bool|none)$)\w+", str(part))]
    name = ".".join(place)[:200] or None
    message, code = in_one_line(ValueError(error["msg"])), None
    if error["type"] == "extra_forbidden":
        message, code = "unknown field; leave it out", "unknown_field"
    elif error["type"] == "none_required":
        message, code = "not supported by this server; leave it out", "unsupported"
    return ApiError(400, f"{name or 'the body'}: {message}", param=name, code=code)
