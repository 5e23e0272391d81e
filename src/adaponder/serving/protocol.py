"""Bodies of requests, as OpenAI documents them, and under ``adaponder`` what only this server has.

Fields of OpenAI's that are not supported are of type ``null``: their names are known, and refused with a sentence.
Fields that change nothing are taken and left alone. Any other field is refused by its name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from adaponder.inference.request import MOST_BIASES, MOST_SAMPLES, MOST_TOP
from adaponder.text.stops import LONGEST_STOP, MOST_STOPS

_LARGEST = 2**63 - 1
_PROMPT = 1 << 20

TokenId = Annotated[int, Field(ge=0, le=_LARGEST)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=_PROMPT)]
Text = Annotated[str, Field(max_length=_PROMPT)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Seed = Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _refuse_true(value: bool) -> bool:
    if value:
        raise ValueError("this server does not support it; leave it out")
    return value


Never = Annotated[bool, AfterValidator(_refuse_true), Field(json_schema_extra={"const": False})]
Unsupported = Annotated[None, Field(description="Not supported: only null is taken.")]


class Body(BaseModel):
    """A body or a part of one: types as they are written, no unknown field, no NaN, no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DepthControl(Body):
    """Who decides how often each token is read: at most one of policy, tau and budget; else the model's own rule."""

    policy: str | None = Field(None, max_length=400, description="A rule in one line, e.g. fixed:2 or entropy:2.5.")
    tau: float | None = Field(None, ge=0, le=1, description="Another threshold of the learned gate.")
    budget: Annotated[float, Field(ge=1, le=1000)] | Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        None, description="A calibrated profile by name, or a mean depth between calibrated profiles."
    )
    max_iterations: int | None = Field(None, ge=1, le=1000, description="Read no token more often than this.")
    depths: dict[Annotated[str, Field(pattern=r"^[0-9]{1,7}$")], Annotated[int, Field(ge=1, le=1000)]] | None = Field(
        None, max_length=65536, description="Forced depth by slot: the place of a token in its sequence, from 0."
    )
    gates: bool = Field(
        False, description="Return what the gates said: of each scored token, or of the one before each new token."
    )
    iteration_top: int = Field(0, ge=0, le=MOST_TOP, description="Return so many likeliest tokens of each iteration.")
    seed: Seed | None = Field(None, description="Of sampling and of policies that draw, as OpenAI's seed; one of them.")


class Generation(DepthControl):
    """What a completion may be told and asked beside OpenAI's fields."""

    depth: bool = Field(False, description="Return depths: of each prompt token, and of the one before each new token.")
    top_k: int = Field(0, ge=0, le=_LARGEST)
    min_p: float = Field(0.0, ge=0, le=1)
    # Logits are divided by it: beyond these they would leave the numbers that a float holds.
    repetition_penalty: float = Field(1.0, ge=1e-3, le=1e3)
    min_tokens: int = Field(0, ge=0, le=_LARGEST)
    ignore_eos: bool = False

    @property
    def of_tokens(self) -> bool:
        """Whether an answer names its tokens."""
        return self.depth or self.gates or self.iteration_top > 0


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Never | None = None


class _Common(Body):
    """What completions and chats have in common."""

    model: str = Field(max_length=512)
    frequency_penalty: Penalty | None = None
    logit_bias: dict[Annotated[str, Field(max_length=20)], Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MOST_BIASES
    )
    max_tokens: int | None = Field(None, ge=0, le=_LARGEST)
    n: int | None = Field(None, ge=1, le=MOST_SAMPLES)
    presence_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    user: str | None = Field(None, max_length=512, description="Changes nothing.")
    adaponder: Generation | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def own(self) -> Generation:
        return self.adaponder or Generation()  # pyright: ignore[reportCallIssue]

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(_Common):
    """``POST /v1/completions``."""

    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, max_length=1024)]
        | Annotated[list[Ids], Field(min_length=1, max_length=1024)]
    )
    best_of: int | None = Field(None, ge=1, le=MOST_SAMPLES)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    suffix: Unsupported = None


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=256)]
    name: str | None = Field(None, max_length=64)
    refusal: None = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tool_calls: Unsupported = None

    def as_dict(self) -> dict[str, str]:
        """The message as a chat template takes it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class TextFormat(Body):
    type: Literal["text"]


class ChatBody(_Common):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    max_completion_tokens: int | None = Field(None, ge=0, le=_LARGEST)
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16, description="Changes nothing."
    )
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    prompt_cache_key: str | None = Field(None, max_length=512, description="Changes nothing.")
    response_format: TextFormat | None = None
    safety_identifier: str | None = Field(None, max_length=512, description="Changes nothing.")
    service_tier: Literal["auto", "default"] | None = None
    store: Never | None = None
    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    parallel_tool_calls: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    tool_choice: Unsupported = None
    tools: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None


class TokenizeBody(Body):
    """``POST /tokenize``."""

    prompt: Text
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    tokens: Annotated[list[TokenId], Field(max_length=_PROMPT)]


class ScoreBody(Body):
    """``POST /score``."""

    prompt: Text | Ids
    model: str | None = Field(None, max_length=512)
    adaponder: DepthControl | None = None
    full_depth: bool = False

    @property
    def own(self) -> DepthControl:
        return self.adaponder or DepthControl()  # pyright: ignore[reportCallIssue]
