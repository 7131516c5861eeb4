import numpy as np
from indexer.contract import functions as f, keys, block_hash as bh
from indexer.contract.records import *
from indexer.contract.identifiers import *

async def test_all(redis_client):
    r = redis_client
    fid = keys.fleet_id("m")
    fr = FleetRecord(fleet_id=fid, model_scope="m", block_size_tokens=16, partitions=1, bucket_bits=10, epoch=12345678901234567)
    got = f.fleet_record(fid, await f.run(r, f.create(fr)))
    assert got == fr
    rec = InstanceRecord(instance_id=InstanceId("a"), url="http://x", models=["m"], model_root="r", block_size_tokens=16)
    assert InstanceRecord.decode(rec.encode()) == rec
    a = await f.run(r, f.join(fid, rec.encode()))
    b = await f.run(r, f.join(fid, rec.encode()))
    assert (a, b) == ([0, 1], [1, 1])
    for s, g in (a, b):
        assert await f.run(r, f.open_slot(fid, s, g)) == 1
    p = bh.pack_tokens(list(range(1600)))
    h = bh.chain(bh.root(model_scope="m", block_size_tokens=16), p, 16)
    hs = bh.split(h)
    assert await f.run(r, f.store(fr, 0, 1, hs[:70])) == 1
    assert await f.run(r, f.store(fr, 1, 1, hs[:33])) == 1
    assert await f.run(r, f.store(fr, 1, 2, hs[:33])) == 0
    out = np.zeros(256, np.int64)
    f.depths(await f.run(r, f.lookup(fr, 0, h)), out)
    assert out[:3].tolist() == [70, 33, 0]
    assert await f.run(r, f.remove(fr, 0, 1, hs[70:19:-1])) == 1
    out[:] = 0
    f.depths(await f.run(r, f.lookup(fr, 0, h)), out)
    assert out[:3].tolist() == [20, 33, 0]
    assert await f.run(r, f.heartbeat(fr, 0, 1, counters=f.EngineCounters(running_count=3, waiting_count=2, kv_usage_ratio=.5))) == [0, 0]
    rid = RouterId("r1")
    cand = np.array([(0, 1, 100), (1, 1, 50)], f.CANDIDATE)
    assert (await f.run(r, f.reserve(fid, rid, 1, cand)))[0] == b"lost"
    assert await f.run(r, f.register(fid, rid, begin=False)) == 0
    assert await f.run(r, f.register(fid, rid, begin=True)) == 1
    got = await f.run(r, f.reserve(fid, rid, 1, cand))
    assert got[:2] == [b"ok", 1]
    assert np.frombuffer(got[2], f.CANDIDATE_STATE).tolist() == [(0, 5), (0, 0)]
    c = f.fleet_counters(await f.run(r, f.read(fid)))
    print(c)
    assert c.slots["reserved_requests"].tolist() == [0, 1]
    assert c.slots["reserved_prefill_tokens"].tolist() == [0, 50]
    assert await f.run(r, f.prefilled(fid, rid, 1)) == 1
    assert await f.run(r, f.release(fid, rid, 1)) == 1
    assert await f.run(r, f.release(fid, rid, 1)) == 0
    assert (await f.run(r, f.reserve(fid, rid, 1, cand)))[0] == b"late"
    assert await f.run(r, f.sync(fid, rid, (7).to_bytes(8, "little") + f.RESERVATION.pack(0, 1, 9, 0), forget_tombstones=True)) == [1, 0]
    assert await f.run(r, f.reap(fid)) == []
    assert await f.run(r, f.reap(fid, rid)) == [b"r1", 1]
    c = f.fleet_counters(await f.run(r, f.read(fid)))
    assert c.slots["reserved_prefill_tokens"].tolist() == [0, 0]
    assert await f.run(r, f.close(fid, 0, 1, -1)) == 1
    assert await f.run(r, f.sweep(fid, 0, 0, 1024)) == 20
    assert await f.run(r, f.free(fid, 0, 1)) == 1
    assert await f.run(r, f.join(fid, rec.encode())) == [0, 2]
