"""A key for some models reaches no other: whatever path is asked, whether it names one or none."""

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from holding_engine import HoldingEngine
from router_edge import PROMPT, FakeEngine, completion, edge, plain

from router.door.visitor import digest_of
from router.requests.endpoints import ENDPOINTS

pytestmark = pytest.mark.integration

LIMITED, FREE = "sk-first-key-of-a-client", "sk-second-key-of-a-client"
LORA = {"adapters": ["lora"]}
"""What the engines have loaded, beside their model `m`."""

USER = {"role": "user", "content": "hi"}
PAIR = {"query": "a", "documents": ["b"], "text_1": "a", "text_2": "b"}
BODIES: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": ({"messages": [USER]},),
    "/v1/completions": ({"prompt": PROMPT},),
    "/v1/responses": ({"input": "hi"}, {"input": "hi", "previous_response_id": "resp_1"}),
    "/v1/messages": ({"messages": [USER], "max_tokens": 1},),
    "/v1/messages/count_tokens": ({"messages": [USER]},),
    "/v1/embeddings": ({"input": "hi"},),
    "/v2/embed": ({"texts": ["hi"]},),
    "/pooling": ({"input": "hi"},),
    "/classify": ({"input": "hi"},),
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), (PAIR,)),
    "/generative_scoring": ({"query": "a", "items": ["b"]},),
    "/cohere/v2/chat": ({"messages": [USER]},),
    "/tokenize": ({"prompt": "hi"},),
    "/detokenize": ({"tokens": [1]},),
    "/v1/audio/transcriptions": ({},),
    "/v1/audio/translations": ({},),
    "/inference/v1/generate": ({"token_ids": PROMPT, "sampling_params": {}},),
    "/v1/anything/else": ({}, {"input": "hi"}),
}
"""Good bodies of each endpoint, but for the model."""


def key_file(folder: Path, models: list[str]) -> str:
    """A file with LIMITED, for these models, and FREE."""
    path = folder / "keys.jsonl"
    entries = [
        {"name": "limited", "sha256": digest_of(LIMITED).hex(), "models": models},
        {"name": "free", "sha256": digest_of(FREE).hex()},
    ]
    path.write_text("\n".join(map(json.dumps, entries)))
    return str(path)


async def asked(client: ClientSession, key: str, method: str, path: str, body: Any = None) -> Any:
    """Status and text of an answer; audio paths take a form."""
    sent: dict[str, Any] = {"json": body}
    if "/audio/" in path:
        parts = body | {"file": "x"}
        form = [f'Content-Disposition: form-data; name="{n}"\r\n\r\n{v}' for n, v in parts.items()]
        content = "".join(f"--b\r\n{part}\r\n" for part in form if "None" not in part) + "--b--\r\n"
        sent = {"data": content, "headers": {"Content-Type": "multipart/form-data; boundary=b"}}
    headers = sent.pop("headers", {}) | {"Authorization": f"Bearer {key}"}
    async with client.request(method, path, headers=headers, **sent) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize("models", [["lora"], ["soft"], ["another"], []])
async def test_no_endpoint_leads_to_a_model_that_the_key_is_not_for(
    redis_client, redis_socket, tmp_path, models
) -> None:
    """403 for another one's name and for none; 400 where a model is required; no engine is asked.

    The same requests are served for a key without bounds, so what is refused is the key.
    """
    assert {*BODIES} - {"/v1/anything/else"} == {*ENDPOINTS}
    engine = FakeEngine("a", plain)
    config: dict[str, Any] = {"model_aliases": {"soft": "lora"}}
    config |= {"api_keys_file": key_file(tmp_path, models), "record": LORA}
    allowed, refused = {}, {}
    async with edge(redis_client, redis_socket, engine, **config) as one:
        for path, bodies in BODIES.items():
            for body in bodies:
                for sent in (body | {"model": "m"}, body, body | {"model": None}):
                    seen = f"{path} {json.dumps(sent)}"
                    allowed[seen], _ = await asked(one.client, FREE, "POST", path, sent)
                    before = len(engine.bodies)
                    refused[seen], said = await asked(one.client, LIMITED, "POST", path, sent)
                    assert len(engine.bodies) == before, seen
                    assert sent.get("model") == "m" or "`m`" not in said, said
    assert {*allowed.values()} <= {200, 400}
    assert refused == {seen: 403 if status == 200 else 400 for seen, status in allowed.items()}
    assert {status for seen, status in allowed.items() if '"model": "m"' in seen} == {200}


@pytest.mark.parametrize(
    ("models", "statuses"),
    [
        (["m"], [200, 200, 200]),
        (["pretty"], [200, 200, 200]),
        (["lora"], [200, 200, 403]),
        (["soft"], [200, 200, 403]),
        (["another", "lost"], [403, 403, 403]),
        ([], [403, 403, 403]),
    ],
)
async def test_an_answers_id_without_a_model_is_for_keys_of_its_fleet(
    redis_client, redis_socket, tmp_path, models, statuses
) -> None:
    """By any of its names and their aliases, to read and cancel; the next turn is the base model's.

    A refusal names no model: the key sees none of them.
    """
    config: dict[str, Any] = {"model_aliases": {"pretty": "m", "soft": "lora", "lost": "nowhere"}}
    config |= {"api_keys_file": key_file(tmp_path, models), "record": LORA}
    engine = HoldingEngine("a")
    async with edge(redis_client, redis_socket, engine, **config) as one:
        _, made = await asked(
            one.client, FREE, "POST", "/v1/responses", {"model": "m", "input": "hi"}
        )
        path = f"/v1/responses/{json.loads(made)['id']}"
        body = {"input": "And?", "previous_response_id": json.loads(made)["id"]}
        seen = [
            await asked(one.client, LIMITED, "GET", path),
            await asked(one.client, LIMITED, "POST", f"{path}/cancel"),
            await asked(one.client, LIMITED, "POST", "/v1/responses", body),
        ]
    assert [status for status, _ in seen] == statuses
    assert not [text for status, text in seen if status == 403 and "`m`" in text]


async def test_whoever_makes_an_answer_by_an_alias_may_read_and_cancel_it(
    redis_client, redis_socket, tmp_path
) -> None:
    """The key sees the alias alone, and needs nothing else."""
    config: dict[str, Any] = {"model_aliases": {"pretty": "m"}}
    config |= {"api_keys_file": key_file(tmp_path, ["pretty"])}
    async with edge(redis_client, redis_socket, HoldingEngine("a"), **config) as one:
        body = {"model": "pretty", "input": "hi"}
        status, made = await asked(one.client, LIMITED, "POST", "/v1/responses", body)
        path = f"/v1/responses/{json.loads(made)['id']}"
        read, _ = await asked(one.client, LIMITED, "GET", path)
        cancelled, _ = await asked(one.client, LIMITED, "POST", f"{path}/cancel")
    assert (status, read, cancelled) == (200, 200, 200)


async def test_a_missing_model_of_a_key_tells_nothing_of_others(
    redis_client, redis_socket, tmp_path
) -> None:
    """The 404 lists what the key may ask for, as /v1/models does."""
    config: dict[str, Any] = {"api_keys_file": key_file(tmp_path, ["lora", "gone"]), "record": LORA}
    async with edge(redis_client, redis_socket, FakeEngine("a", plain), **config) as one:
        body = completion(model="gone")
        status, said = await asked(one.client, LIMITED, "POST", "/v1/completions", body)
        assert (status, "Models served here: lora." in said) == (404, True), said
        status, said = await asked(one.client, FREE, "POST", "/v1/completions", body)
        assert (status, "Models served here: lora, m." in said) == (404, True), said
