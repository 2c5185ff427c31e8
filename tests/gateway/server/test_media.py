"""Audio and images by way of the gateway, with OpenAI's own client: passed on as they are, with limits and errors."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import serving
from headway.gateway.errors import ApiError
from headway.gateway.relay.form_body import Form
from headway.gateway.relay.request_reader import read_request
from headway.records.parquet import load
from keys import digest
from serving import MODEL, metric, send, until

openai = pytest.importorskip("openai")
pytest.importorskip("httptools")
pytestmark = pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # by the client, of translations
AUDIO = bytes(32_000 * 4)
"""Four seconds."""
FORM = "multipart/form-data; boundary=xyz"


def gateway(folder: Path, engines: list[serving.Process], *options: str) -> serving.Process:
    settings = {"max_body_bytes": 1 << 20, "api_keys": [{"sha256": digest("mine"), "name": "mine"}]}
    path = serving.fleet_file(folder, [each.url for each in engines], gateway=settings)
    return serving.gateway(path, *options)


@pytest.fixture(scope="module", params=["1", "2"])
def front(
    request: pytest.FixtureRequest, engines: list[serving.Process], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[serving.Process]:
    made = gateway(tmp_path_factory.mktemp("fleet"), engines, "--workers", request.param)
    with serving.closing(made):
        serving.all_up(made, 2)
        yield made


def client_of(front: serving.Process) -> Any:
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="mine", max_retries=0)


@pytest.fixture
def client(front: serving.Process) -> Iterator[Any]:
    with client_of(front) as made:
        yield made


def test_audio_becomes_text(client: Any, front: serving.Process) -> None:
    answer = client.audio.transcriptions.create(model=MODEL, file=("a.wav", AUDIO), prompt="of cats")
    assert len(answer.text.split()) == 10
    assert client.audio.translations.create(model=MODEL, file=("a.wav", AUDIO)).text
    text = client.audio.transcriptions.create(model=MODEL, file=("a.wav", AUDIO), response_format="text")
    assert len(str(text).split()) == 10
    until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_text_comes_as_it_is_recognised(client: Any) -> None:
    with client.audio.transcriptions.with_streaming_response.create(
        model=MODEL, file=("a.wav", AUDIO), stream=True
    ) as answer:
        events = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "data: [DONE]" and '"usage"' in events[-2]
    text = serving.answer_text([json.loads(event.removeprefix("data: ")) for event in events[:-1]])
    assert len(text.split()) == 10


def test_text_becomes_audio(client: Any) -> None:
    data = client.audio.speech.create(model=MODEL, input="the cat sat", voice="any", response_format="wav").read()
    with wave.open(io.BytesIO(data)) as audio:
        assert audio.getnframes() / audio.getframerate() == pytest.approx(1.2)


def test_text_becomes_images(client: Any) -> None:
    answer = client.images.generate(model=MODEL, prompt="a cat", n=2, size="32x16")
    pictures = [base64.b64decode(each.b64_json) for each in answer.data]
    assert len(pictures) == 2 and pictures[0].startswith(b"\x89PNG") and pictures[0][16:24] == b"\0\0\0\x20\0\0\0\x10"
    assert answer.usage.output_tokens == 2


def test_a_chat_may_have_images(client: Any) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is this"}, picture]}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3)
    assert answer.usage.completion_tokens == 3


def test_keys_models_and_bad_fields_are_checked(client: Any, front: serving.Process) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such"):
        client.audio.transcriptions.create(model="no-such", file=("a.wav", AUDIO))
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.audio.transcriptions.create(model=MODEL, file=("a.wav", AUDIO), response_format="srt")
    with pytest.raises(openai.BadRequestError, match="input"):
        client.post("/audio/speech", body={"model": MODEL}, cast_to=object)
    with pytest.raises(openai.APIStatusError, match=r"1,048,576|1048576"):
        client.audio.transcriptions.create(model=MODEL, file=("a.wav", bytes(2 << 20)))
    other = openai.OpenAI(base_url=f"{front.url}/v1", api_key="yours", max_retries=0)
    with other, pytest.raises(openai.AuthenticationError):
        other.images.generate(model=MODEL, prompt="a cat")
    headers = {"authorization": "Bearer mine", "content-type": "application/json"}
    reply = send(front, "/v1/audio/transcriptions", b"{}", headers)
    assert reply.status == 415 and "multipart/form-data" in reply.json()["error"]["message"]


# Forms.


def part(name: str, value: bytes, more: str = "") -> bytes:
    return b'--xyz\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), more.encode(), value)


FILE = part("file", b"\r\n--xy no end\r\n\0", '; filename="a.wav"\r\nContent-Type: audio/wav')


def test_the_model_is_renamed_and_nothing_else() -> None:
    raw = part("model", b"llama") + FILE + part("model", b"llama") + b"--xyz--\r\n"
    form = Form(raw, FORM)
    assert form.fields == {"model": "llama"}
    assert form.with_field("model", "meta/Llama") == raw.replace(b"llama", b"meta/Llama")
    request = read_request("/v1/audio/transcriptions", raw, {"content-type": FORM})
    assert request.encoded(request.body) is raw and request.content_type == FORM and request.has_media
    assert request.encoded({**request.body, "model": "x"}) == form.with_field("model", "x")


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"--xyz", 400),
        (part("model", b"m"), 400),
        (b"--xyz\r\nno head\r\n--xyz--", 400),
        (part("a", b"") * 80 + b"--xyz--", 400),
        (FILE + b"--xyz--", 400),
        (b"{}", 400),
    ],
)
def test_forms_that_are_none(raw: bytes, status: int) -> None:
    with pytest.raises(ApiError) as error:
        read_request("/v1/audio/translations", raw, {"content-type": FORM})
    assert error.value.status == status


@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_was_transcribed_is_recorded(engines: list[serving.Process], tmp_path: Path, workers: str) -> None:
    front = gateway(tmp_path, engines, "--workers", workers, "--records", str(tmp_path / "records"))
    with serving.closing(front):
        serving.all_up(front, 2)
        with client_of(front) as client:
            for _ in range(2):
                client.audio.transcriptions.create(model=MODEL, file=("a.wav", AUDIO))
        until(lambda: metric(front, "headway_requests_total") == 2)
        front.stop()
    records, _ = load(tmp_path / "records")
    assert records.requests["outcome"].tolist() == [0, 0]
