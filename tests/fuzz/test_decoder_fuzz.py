"""A bounded share of the decoder's fuzzing (at length: make fuzz)."""

import secrets

from fuzz import decoder_fuzz

INPUTS = 20_000


def test_no_input_stops_the_decoder_or_the_table() -> None:
    """Whatever comes is decoded or counted, and publishes nothing but what it stores.

    A failure's note names the seed and the input.
    """
    totals = decoder_fuzz.run(INPUTS, secrets.randbelow(2**32))
    assert min(totals.events, totals.malformed_batches, totals.malformed_events) > INPUTS // 10
    assert min(totals.unknown_events, totals.published) > INPUTS // 500
