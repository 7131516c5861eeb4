"""vLLM's own WebSocket endpoint behind a router, and OpenAI's client in front of it.

Nothing that it serves is small enough for a test, so its model is left out: a word for each sound.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from free_ports import free_ports
from router_edge import edge
from waiting import until

from tests.vllm.settings import VLLM_PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SERVER = """
import sys
from types import SimpleNamespace
import uvicorn
from fastapi import FastAPI
from vllm.entrypoints.speech_to_text.realtime.api_router import router

class Engine:
    async def generate(self, *, prompt, sampling_params, request_id):
        async for _ in prompt:
            word = SimpleNamespace(text="word ", token_ids=[7])
            yield SimpleNamespace(outputs=[word], prompt_token_ids=[1, 2])
    async def abort(self, request_id):
        pass

class Serving:
    engine_client = Engine()
    model_cls = SimpleNamespace(realtime_max_tokens=1)
    def _is_model_supported(self, model):
        return model == "m"
    async def transcribe_realtime(self, audio, tokens):
        async for sound in audio:
            yield sound

app = FastAPI()
app.include_router(router)
app.state.openai_serving_realtime = Serving()
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""

CLIENT = """
import asyncio, base64, sys
import openai

async def main():
    client = openai.AsyncOpenAI(base_url=sys.argv[1], api_key="none")
    sound = base64.b64encode(bytes(3200)).decode()
    async with client.realtime.connect(model="m") as connection:
        async def say(**event):
            await connection.send(event)
        print((await connection.recv()).type)
        await say(type="session.update", model="m")
        await say(type="input_audio_buffer.commit")
        for _ in range(3):
            await say(type="input_audio_buffer.append", audio=sound)
        await say(type="input_audio_buffer.commit", final=True)
        async for event in connection:
            print(event.type)
            if event.type == "transcription.done":
                print(event.text)
                return

asyncio.run(main())
"""


@dataclass
class Vllm:
    """A process of its own, which takes long to import what it needs."""

    name: str = "a"
    port: int = field(default_factory=lambda: free_ports(1)[0])

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Vllm"]:
        """From its first connection on."""
        command = (str(VLLM_PYTHON), "-W", "ignore", "-c", SERVER, str(self.port))
        process = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
        try:
            await until(self._listens, "vLLM listens", 400.0)
            yield self
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _listens(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True


async def test_speech_is_transcribed_through_a_router(redis_client, redis_socket) -> None:
    """Each sound is a word, as if there were no router; the session has ended when it has."""
    async with edge(redis_client, redis_socket, Vllm()) as one:
        url = f"http://127.0.0.1:{one.process.listeners.port}/v1"
        command = (str(VLLM_PYTHON), "-W", "ignore", "-c", CLIENT, url)
        pipe = asyncio.subprocess.PIPE
        client = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        async with asyncio.timeout(120):
            told, said = await client.communicate()
        assert client.returncode == 0, said.decode()[-2000:]
        assert told.decode().split("\n") == [
            "session.created",
            *["transcription.delta"] * 3,
            "transcription.done",
            "word word word ",
            "",
        ]
        await one.settled()
