import json, asyncio, sys
import pytest, aiohttp
from router_edge import *
from fleets import *
import importlib.util, pathlib
spec=importlib.util.spec_from_file_location('ttl', pathlib.Path(__file__).parent/'test_two_legs.py'); m=importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
fleet,ask,prefiller,decoder,Gone,legs=m.fleet,m.ask,m.prefiller,m.decoder,m.Gone,m.legs
pytestmark=pytest.mark.integration
async def test_a(redis_client, redis_socket):
    p, d = prefiller("p"), Gone("bad", hang_up, role="decode")
    async with fleet(redis_client, redis_socket, p, d) as one:
        print("A", (await ask(one))[:2], len(p.bodies))
async def test_b(redis_client, redis_socket):
    p, b = prefiller("p"), FakeEngine("b", hang_up, role="both")
    async with fleet(redis_client, redis_socket, p, b) as one:
        for n in range(6):
            x=len(p.bodies),len(b.bodies)
            print("B", (await ask(one, prompt=[n]*64))[:2], len(p.bodies)-x[0], len(b.bodies)-x[1])
async def test_c(redis_client, redis_socket):
    p, d, e = prefiller("p"), decoder("d", failing(500)), decoder("e", failing(500))
    async with fleet(redis_client, redis_socket, p, d, e, ejection_failures_min=1) as one:
        for n in range(4): print("C", (await ask(one))[0])
        async with one.client.get("/fleet") as answer:
            print("C", [i["ejection"] for i in (await answer.json())["fleets"][0]["instances"]])
