"""Stop strings end an answer where its text holds them."""

import json

from workers.simulated.answer import StopPoint, find_stop
from workers.simulated.protocol import Body, Generation, parse_generation
from workers.simulated.text import SHIPPED_TOKENIZER, TextModel

TEXT = TextModel(SHIPPED_TOKENIZER)
SEED = 11
PIECES = [TEXT.output_text(SEED, position) for position in range(6)]


def make_call(**fields: object) -> Generation:
    """A text completion call."""
    return parse_generation(Body(json.dumps(fields).encode()), chat=False)


def test_stop_string_across_tokens_ends_with_the_token_that_completes_it() -> None:
    """The text before it is kept, the tokens up to its end are generated."""
    stop = PIECES[2][-2:] + PIECES[3][:2]
    expected = StopPoint(output_tokens=4, text_chars=len("".join(PIECES[:3])) - 2, stop_text=stop)
    assert find_stop(TEXT, make_call(stop=stop), seed=SEED, output_tokens=6) == expected


def test_stop_string_can_be_left_in() -> None:
    """`include_stop_str_in_output` keeps it."""
    call = make_call(stop=PIECES[1], include_stop_str_in_output=True)
    point = find_stop(TEXT, call, seed=SEED, output_tokens=6)
    assert point is not None
    assert point.text_chars == len("".join(PIECES[:2]))


def test_earliest_of_several_wins() -> None:
    """The order of the list does not matter."""
    call = make_call(stop=[PIECES[4], PIECES[1]])
    point = find_stop(TEXT, call, seed=SEED, output_tokens=6)
    assert point is not None
    assert point.output_tokens == 2


def test_stop_string_that_does_not_occur_changes_nothing() -> None:
    """Also one that no answer can hold."""
    call = make_call(stop=["\n\n", "zzzzqqqq"])
    assert find_stop(TEXT, call, seed=SEED, output_tokens=6) is None
