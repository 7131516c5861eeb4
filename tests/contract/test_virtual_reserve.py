"""The virtual reservation chooses and books what the server's own does."""

import numpy as np
from builders import make_fleet_record, make_instance
from contract.embedded_server import EmbeddedServer
from contract.prompts import candidates, tailed

from indexer.contract import fleet_functions, reservations
from indexer.contract.identifiers import RouterId
from indexer.contract.reservations import InFlight
from loadgen.simulation.shared_books import MOVED, OK, SharedBooks

FLEET = make_fleet_record(bucket_bits=4, epoch=0xFEDCBA9876543210)
COLUMNS = ["generation", "reserved_requests", "reserved_prefill_tokens", "reserved_requests_peak"]
SLOTS = 12


def named_choice(
    rng: np.random.Generator, rows: np.ndarray, books: SharedBooks
) -> tuple[int, int, np.ndarray | None]:
    """Half of the time none; else a candidate, its batch size, or another, and what all compute."""
    if rng.random() < 0.5:
        return -1, -1, None
    choice = int(rng.integers(SLOTS))
    batch = int(books.slots["reserved_requests"][rows["slot"][choice]])
    expected = rng.choice([batch, batch + 1, -1], p=[0.7, 0.2, 0.1])
    return choice, int(expected), rows["new_prefill_tokens"] if expected >= 0 else None


def test_the_virtual_reserve_equals_the_servers(server: EmbeddedServer) -> None:
    """Reservations with siblings, first tokens and ends: the same choices, the same books.

    By the product, and of one named candidate, as it was seen or not any more.
    """
    statuses = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        server.found(FLEET)
        books = SharedBooks(SLOTS)
        for slot in range(SLOTS):
            record = make_instance(f"i{slot}").encode()
            server.call(fleet_functions.join(FLEET.fleet_id, record))
            books.open(slot)
        routers = [RouterId(name) for name in ("a", "b")]
        for router in routers:
            server.call(reservations.register(FLEET.fleet_id, router, begin=True))
        booked: list[tuple[int, int]] = []
        for sequence in range(1, 60):
            action = rng.random()
            if booked and action < 0.3:
                key = booked[int(rng.integers(len(booked)))]
                server.call(reservations.prefilled(FLEET.fleet_id, routers[key[0]], key[1]))
                books.prefilled(key)
            elif booked and action < 0.45:
                key = booked.pop(int(rng.integers(len(booked))))
                server.call(reservations.release(FLEET.fleet_id, routers[key[0]], key[1]))
                books.release(key)
            else:
                key = (int(rng.integers(2)), sequence)
                shared, tail = int(rng.choice([18, 40])), int(rng.choice([0, 20, 37]))
                milestones, prompt = tailed(shared, tail)
                hits = rng.integers(0, shared, SLOTS) * 16 * rng.integers(0, 2, SLOTS)
                order = rng.permutation(SLOTS)
                rows = candidates(
                    *((int(s), 1, int(prompt.tokens - hits[s])) for s in order.tolist())
                )
                choice, batch, tokens = named_choice(rng, rows, books)
                more = InFlight(
                    milestones=milestones,
                    block_size_tokens=np.full(SLOTS, 16),
                    expected_tokens=tokens,
                )
                call = reservations.reserve(
                    FLEET.fleet_id,
                    routers[key[0]],
                    sequence,
                    rows,
                    choice=choice,
                    expected_batch_size=batch,
                    in_flight=more,
                    prompt_tokens=prompt.tokens,
                )
                answer = server.call(call)
                statuses.add(answer[0])
                assert tuple(answer) == books.reserve(
                    *(key, rows, more),
                    now_s=1.0,
                    choice=choice,
                    expected_batch_size=batch,
                    prompt_tokens=prompt.tokens,
                )
                booked += [key] if answer[0] == OK else []
            counters = server.counters(FLEET)
            every = np.arange(SLOTS)
            assert counters.context_tokens(every).tolist() == books.contexts.tolist()
            slots = counters.slots[:SLOTS]
            for column in COLUMNS:
                assert slots[column].tolist() == books.slots[column].tolist(), column
    assert statuses == {OK, MOVED}
