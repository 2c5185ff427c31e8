"""Audio and images of an emulated engine: transcriptions, translations, speech and pictures.

A transcription is a prefill of the audio's tokens and a decode of generated words. Speech and pictures take the time of
a prefill of their text.
"""

from __future__ import annotations

import base64
import io
import struct
import time
import wave
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from headway.emulator import tokens
from headway.emulator.completion import BadRequestError, SurfaceConfig
from headway.emulator.engine import EmulatedEngine
from headway.emulator.tokens import TokenSequence

_BYTES_PER_S = 32_000
"""Bytes per second of audio: 16 kHz with 16 bits."""
_PROMPT_TOKENS_PER_S, _WORDS_PER_S = 50, 2.5
_SAMPLE_RATE = 16_000
_WORD_S = 0.4
_MAX_SIDE = 4096
GetEngine = Callable[[], EmulatedEngine]
Handler = Callable[[GetEngine, SurfaceConfig, Request], Awaitable[Response]]


def media_routes(engine: GetEngine, config: SurfaceConfig) -> list[Route]:
    """The routes for audio and images of OpenAI's API."""
    handlers: dict[str, Handler] = {
        "/v1/audio/transcriptions": _transcribe,
        "/v1/audio/translations": _transcribe,
        "/v1/audio/speech": _speech,
        "/v1/images/generations": _images,
    }

    def endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            try:
                return await handler(engine, config, request)
            except (BadRequestError, msgspec.MsgspecError) as error:
                kind = {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}
                return JSONResponse({"error": kind}, 400)

        return respond

    return [Route(path, endpoint(handler), methods=["POST"]) for path, handler in handlers.items()]


async def _transcribe(engine: GetEngine, config: SurfaceConfig, request: Request) -> Response:
    async with request.form() as form:
        file, kind = form.get("file"), form.get("response_format") or "json"
        if not isinstance(file, UploadFile):
            raise BadRequestError("file is missing")
        seconds, hint = len(await file.read()) / _BYTES_PER_S, tokens.encode(str(form.get("prompt") or ""))
        is_streamed = str(form.get("stream") or "").lower() in ("true", "1")
    if kind not in ("json", "text", "verbose_json"):
        raise BadRequestError("response_format: expected json, text or verbose_json")
    num_prompt = max(1, round(seconds * _PROMPT_TOKENS_PER_S) + len(hint))
    num_words = max(1, round(seconds * _WORDS_PER_S))
    if num_prompt + num_words > engine().max_tokens:
        raise BadRequestError(f"{num_prompt} tokens of audio are more than this engine takes")
    words = _words(engine(), num_prompt, num_words)
    if is_streamed:
        total = num_prompt + num_words
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_words, "total_tokens": total}
        return StreamingResponse(_events(words, config.name, usage), media_type="text/event-stream")
    text = "".join([piece async for piece in words])
    if kind == "text":
        return PlainTextResponse(text)
    answer: dict[str, Any] = {"text": text, "usage": {"type": "duration", "seconds": max(1, round(seconds))}}
    if kind == "verbose_json":
        answer |= {"duration": seconds, "language": "english", "segments": []}
    return JSONResponse(answer)


async def _speech(engine: GetEngine, config: SurfaceConfig, request: Request) -> Response:
    body = await _json(request)
    text, kind = body.get("input"), body.get("response_format") or "wav"
    if not isinstance(text, str) or not text:
        raise BadRequestError("input must be a text")
    if kind not in ("wav", "pcm"):
        raise BadRequestError("response_format: this engine makes wav and pcm")
    num_words = len(tokens.encode(text))
    await _compute(engine(), num_words)
    samples = bytes(2 * round(num_words * _WORD_S * _SAMPLE_RATE))
    return Response(_wav(samples) if kind == "wav" else samples, media_type=f"audio/{kind}")


async def _images(engine: GetEngine, config: SurfaceConfig, request: Request) -> Response:
    body = await _json(request)
    prompt, num = body.get("prompt"), 1 if body.get("n") is None else body["n"]
    width, _, height = str(body.get("size") or "64x64").partition("x")
    if not isinstance(prompt, str) or not prompt:
        raise BadRequestError("prompt must be a text")
    if type(num) is not int or not 1 <= num <= 10:
        raise BadRequestError("n must be from 1 to 10")
    if not all(side.isdecimal() and 0 < int(side[:5]) <= _MAX_SIDE for side in (width, height)):
        raise BadRequestError(f"size: expected WIDTHxHEIGHT, at most {_MAX_SIDE} each")
    num_words = len(tokens.encode(prompt))
    await _compute(engine(), num_words * num)
    picture = base64.b64encode(_png(int(width), int(height), zlib.crc32(prompt.encode()))).decode()
    usage = {"input_tokens": num_words, "output_tokens": num, "total_tokens": num_words + num}
    return JSONResponse({"created": int(time.time()), "data": [{"b64_json": picture}] * num, "usage": usage})


async def _json(request: Request) -> dict[str, Any]:
    body = msgspec.json.decode(await request.body())
    if not isinstance(body, dict):
        raise BadRequestError("expected an object")
    return body


async def _compute(engine: EmulatedEngine, num_tokens: int) -> None:
    """Wait for the duration of a prefill."""
    generated = engine.begin(max(1, min(num_tokens, engine.max_tokens - 1)), 1, 0, 0)
    try:
        while await generated.read():
            pass
    finally:
        engine.abort(generated)


async def _words(engine: EmulatedEngine, num_prompt: int, num: int) -> AsyncIterator[str]:
    """Generate `num` words and yield them piece by piece."""
    sequence = TokenSequence([num_prompt], num, 0)
    generated = engine.begin(num_prompt, num, 0, 0)
    try:
        while new := await generated.read():
            yield sequence.decode(sequence.extend(new))
    finally:
        engine.abort(generated)


async def _events(words: AsyncIterator[str], model: str, usage: dict[str, int]) -> AsyncIterator[bytes]:
    """vLLM's events of a streamed transcription."""
    head = {"id": "trsc", "object": "transcription.chunk", "created": int(time.time()), "model": model}
    async for text in words:
        choice = {"delta": {"content": text}, "finish_reason": None}
        yield b"data: " + msgspec.json.encode({**head, "choices": [choice]}) + b"\n\n"
    yield b"data: " + msgspec.json.encode({**head, "choices": [], "usage": usage}) + b"\n\ndata: [DONE]\n\n"


def _wav(samples: bytes) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(_SAMPLE_RATE)
        audio.writeframes(samples)
    return file.getvalue()


def _png(width: int, height: int, colour: int) -> bytes:
    """A picture of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" + struct.pack(">I", colour)[1:] * width
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(row * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
