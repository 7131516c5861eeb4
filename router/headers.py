"""Names of the headers that mean something to a router."""

from typing import Final

REQUEST_ID: Final = "x-request-id"
"""Of the client, kept, or created here; sent to the instance and back."""

SESSION: Final = "x-session-id"
"""A hint of the client, passed on."""

TURN: Final = "x-timestable-turn"
"""How many earlier answers the prompt holds, of a plain completion: chats say it themselves."""

CATEGORY: Final = "x-timestable-category"
"""To the instance, where the operator lets it: type and turn, for engines that evict by them; a
client's own is kept."""

POLICY: Final = "x-timestable-policy"
"""Asks for a policy, where the operator lets it."""

ASKED_INSTANCES: Final = "x-timestable-instances"
"""The only instances that may be chosen, where the operator lets it; ids, separated by commas."""

EXPLAIN: Final = "x-timestable-explain"
"""Asks for DECISION in the answer."""

PRIORITY: Final = "x-timestable-priority"
"""How important the request is where some have to wait, in place of the body's; lower is more."""

INSTANCE: Final = "x-timestable-instance"
"""Answer: id of the chosen instance."""

PREFILL_INSTANCE: Final = "x-timestable-prefill-instance"
"""Answer: id of the instance that prefilled for that one, where there were two legs."""

DECISION: Final = "x-timestable-decision"
"""Answer: the decision as JSON."""

REASON: Final = "x-timestable-reason"
"""Answer: why there is none from an instance."""

RANK: Final = "x-data-parallel-rank"
"""To the instance: which of its ranks is meant; vLLM's name."""
