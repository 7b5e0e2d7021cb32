"""Requests and answers of the HTTP interface, in OpenAI's shapes, as checked documents."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from runtime.requests import Completion, Output
from runtime.sampling import SamplingParams, TokenLogprob

Int = Annotated[int, BeforeValidator(lambda v: int(v) if isinstance(v, float) and v.is_integer() else v)]
"""JSON has one kind of number: 5.0 is an integer."""
Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[Int, Field(ge=0)]], Field(min_length=1)]


_AS_THEY_ARE = {"temperature", "top_p", "top_k", "min_p", "n", "seed", "frequency_penalty", "presence_penalty"} | {
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
}
"""Fields of a request that `SamplingParams` has under the same name."""


class Strict(BaseModel):
    """Unknown fields are refused: an option that does nothing is worse than an error. So are "5" and true for 5."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False


class Generation(Strict):
    """What completions and chat have in common. top_k .. ignore_eos are extensions, see `SamplingParams`."""

    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    n: Int = Field(1, ge=1)
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    seed: Int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None = (
        None
    )
    user: str | None = None
    top_k: Int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    min_tokens: Int = Field(0, ge=0)
    ignore_eos: bool = False

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or (),
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            **self.model_dump(include=_AS_THEY_ARE),
        )


class CompletionRequest(Generation):
    prompt: Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1)]
    max_tokens: Int = Field(16, ge=1)
    logprobs: Int | None = Field(None, ge=0, le=20)

    def prompts(self) -> "list[str | list[int]]":
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates want it."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {"role": self.role, "content": "".join(parts)}


class ChatRequest(Generation):
    messages: list[Message] = Field(min_length=1)
    max_tokens: Int | None = Field(None, ge=1)
    max_completion_tokens: Int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: Int = Field(0, ge=0, le=20)


class GenerateRequest(Strict):
    prompt: Text
    max_tokens: Int = Field(64, ge=1)
    temperature: float = Field(0.0, ge=0, le=2)
    seed: Int | None = Field(None, ge=-(2**63), lt=2**63)


class GenerateAnswer(BaseModel):
    generated_text: str


class TokenizeRequest(Strict):
    prompt: str
    add_special_tokens: bool = True


class TokenizeAnswer(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


Decode = Callable[[int], str]
"""The text of one token."""


class Style:
    """How one endpoint phrases its answers: completions."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, decode: Decode) -> None:
        self.decode = decode

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return self._choice(index, completion.text, completion.logprobs, completion.finish_reason)

    def delta(self, index: int, output: Output, first: bool) -> dict[str, Any]:
        return self._choice(index, output.text, output.logprobs, output.finish_reason)

    def _choice(self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(logprobs), "finish_reason": reason}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        tokens, offsets, at = [self.decode(entry.token) for entry in logprobs], [], 0
        for token in tokens:
            offsets.append(at)
            at += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [{self.decode(token): logprob for token, logprob in entry.top} for entry in logprobs],
            "text_offset": offsets,
        }


class ChatStyle(Style):
    """Chat completions."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": completion.finish_reason,
        }

    def delta(self, index: int, output: Output, first: bool) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": output.text} | ({"role": "assistant"} if first else {}),
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self.decode(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        content = [
            entry(e.token, e.logprob) | {"top_logprobs": [entry(token, logprob) for token, logprob in e.top]}
            for e in logprobs
        ]
        return {"content": content, "refusal": None}
