"""A request in two legs: what the prefilling engine is asked, and what the decoding one. Pure.

The shapes are those of vLLM's NixlConnector. Everything that they do not demand stays as it came,
byte for byte.
"""

import json
from dataclasses import replace
from typing import Final

from router.requests.api_call import ApiCall, Cost
from router.requests.json_members import members, with_members

PARTED_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Whose answers hand a KV$ over."""

PARAMS: Final = b"kv_transfer_params"

KEEP_KV: Final = json.dumps(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
    }
).encode()
"""Of a prefill leg: somebody will come for what is computed."""

_WHOLE_ONLY: Final = (b'"kv_transfer_params"', b'"use_beam_search"')
"""Keys of a client that speaks of transfers itself, or asks for many sequences at once."""

_LENGTHS: Final = (b"max_tokens", b"max_completion_tokens")
_OF_THE_STREAM: Final = (b"stream_options", b"min_tokens")
"""An engine refuses them beside `stream` false and a single token."""


def parts(call: ApiCall) -> bool:
    """Whether one engine can prefill the request and another one decode it.

    One prompt and one answer: what a prefill holds is taken once. Log probabilities of the prompt
    come from computing it where the answer is made. A single token comes with the prefill.
    """
    return (
        call.endpoint in PARTED_PATHS
        and call.cost is Cost.PREFILL
        and call.prompts_count == call.choices_count == 1
        and call.reads_prefixes
        and decodes(call)
        and not any(key in call.body for key in _WHOLE_ONLY)
    )


def decodes(call: ApiCall) -> bool:
    """Whether there is anything to do behind the prefill: more than one token to generate."""
    return call.output_tokens_max is None or call.output_tokens_max > 1


def prefill_call(call: ApiCall) -> ApiCall:
    """One token, in one piece, and its KV$ kept."""
    put = {PARAMS: KEEP_KV, b"max_tokens": b"1"}
    present = {member.key for member in members(call.body)}
    put |= {key: b"1" for key in _LENGTHS if key in present}
    if b"stream" in present:
        put[b"stream"] = b"false"
    headers = ((name, value) for name, value in call.headers if name.lower() != "accept-encoding")
    return replace(
        call,
        body=with_members(call.body, put, _OF_THE_STREAM),
        headers=tuple(headers),
        stream=False,
    )


def decode_call(call: ApiCall, params: bytes | None) -> ApiCall:
    """The client's request with what the prefill's answer says, unchanged; None: as it came."""
    if params is None:
        return call
    return replace(call, body=with_members(call.body, {PARAMS: params}))


def params_of(answer: bytes) -> bytes | None:
    """`kv_transfer_params` of a prefill's answer, as they stand there; None where there are none.

    An engine without a connector gives none.
    """
    try:
        fields = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get(PARAMS.decode()), dict):
        return None
    found = [one for one in members(answer) if one.key == PARAMS]  # none in UTF-16
    return answer[found[-1].start : found[-1].end] if found else None
