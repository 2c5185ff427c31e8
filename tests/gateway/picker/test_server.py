"""The picker's gRPC server in this process: its health service, its calls, and TLS."""

from __future__ import annotations

import asyncio
from pathlib import Path
from shutil import which
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("httptools")

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from certificates import new_certificate
from ext_proc import desk, headers_message
from headway.core.errors import HeadwayError
from headway.gateway.picker import ext_proc_pb2 as pb
from headway.gateway.picker.server import SERVICE, Picker
from headway.gateway.server.web_server import Tls
from serving import fleet_file

URLS = ["http://127.0.0.1:9001"]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def _health(channel: Any) -> dict[str, Any]:
    stub = health_pb2_grpc.HealthStub(channel)
    names = ("liveness", "readiness", SERVICE)
    return {name: (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names}


async def _until(channel: Any, name: str, status: Any) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while (found := await _health(channel))[name] != status:
            await asyncio.sleep(0.02)
    return found


async def _destination(channel: Any) -> str:
    process = channel.stream_stream(
        f"/{SERVICE}/Process",
        request_serializer=pb.ProcessingRequest.SerializeToString,
        response_deserializer=pb.ProcessingResponse.FromString,
    )
    call = process()
    first = headers_message({":method": "GET", ":path": "/v1/models"}, end_of_stream=True)
    await call.write(pb.ProcessingRequest(request_headers=first))
    told = await call.read()
    await call.done_writing()
    return str(told.request_headers.response.header_mutation.set_headers[0].header.raw_value.decode())


def test_health_says_alive_ready_and_processing(tmp_path: Path) -> None:
    async def story() -> None:
        async with desk(fleet_file(tmp_path, URLS, gateway={"drain_s": 0}), is_up=False) as made:
            picker = Picker(made.gateway)
            port = picker.listen("127.0.0.1:0")
            async with picker.running(), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                assert await _health(channel) == {"liveness": SERVING, "readiness": NOT_SERVING, SERVICE: NOT_SERVING}
                made.set_up(made.gateway.replicas[0])
                assert (await _until(channel, "readiness", SERVING))[SERVICE] == SERVING
                assert await _destination(channel) == "127.0.0.1:9001"
                made.set_up(made.gateway.replicas[0], is_up=False)
                found = await _until(channel, "readiness", NOT_SERVING)
                assert found[SERVICE] == SERVING  # what comes now is held

    asyncio.run(story())


@pytest.mark.skipif(which("openssl") is None, reason="openssl makes the certificate")
def test_tls_and_a_port_that_is_taken(tmp_path: Path) -> None:
    certificate, key = new_certificate(tmp_path)

    async def story() -> None:
        async with desk(fleet_file(tmp_path, URLS, gateway={"drain_s": 0})) as made:
            picker = Picker(made.gateway, Tls(certificate, key))
            with pytest.raises(HeadwayError, match="cannot listen"):
                picker.listen("192.0.2.1:1")
            port = picker.listen("127.0.0.1:0")
            trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
            async with picker.running(), grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted) as channel:
                assert await _destination(channel) == "127.0.0.1:9001"

    asyncio.run(story())
