"""Which served model a request is for."""

from collections.abc import Mapping
from typing import Final

from indexer.contract.responses import Holder
from router import response_holder
from router.door.visitor import Caller
from router.errors import IndexUnavailable, ModelUnknown, NoEligibleInstance, RequestInvalid
from router.index.index_client import INDEX_SILENCE_MAX_S, IndexClient
from router.index.known_fleets import ServedModel, only_model
from router.requests.api_call import ApiCall

REALTIME_ADAPTER: Final = (
    "model: behind a WebSocket vLLM serves the model itself, no adapter. Name the model in the "
    "query, ?model=NAME; GET /v1/models lists them."
)
"""A key for an adapter alone would reach the model that way."""


class ModelLookup:
    """Finds it by the name in the request, else by the answer it names, else there is only one.

    Args:
        index: models.
        aliases: name that clients may ask for -> name that engines serve; keys may be for either.
    """

    def __init__(self, index: IndexClient, aliases: Mapping[str, str]) -> None:
        self._index = index
        self._aliases = aliases

    async def find(
        self, call: ApiCall, holder: Holder | None, caller: Caller | None
    ) -> ServedModel:
        """The model, with its fleet.

        Args:
            call: the request.
            holder: of the earlier answer it names; None: it names none, or nobody knows.
            caller: whose key it has, which decides what it is told of; None: no keys are asked for.

        Raises:
            RequestInvalid: an adapter behind a WebSocket.
            Forbidden: a request without a model, whose key is for none that could answer it.
            IndexUnavailable: nobody knows who serves it.
            NoEligibleInstance: nobody serves it now.
            ModelUnknown: nobody ever did.
        """
        served = await self._named(call, holder, caller)
        if served is not None:
            if call.upgrades and served.adapter is not None:
                raise RequestInvalid(REALTIME_ADAPTER, param="model")
            return served
        model = call.model
        if self._index.heard_age_s() > INDEX_SILENCE_MAX_S:
            raise IndexUnavailable(
                f"The index (Redis) does not answer, so nobody knows who serves `{model}`. "
                "Try again later."
            )
        if self._index.is_scope(model) or not self._index.models():
            raise NoEligibleInstance(f"No instance of `{model}` is here now. Try again later.")
        known = [one for one in self._index.models() if caller is None or caller.may_use(one)]
        raise ModelUnknown(model, known)

    async def _named(
        self, call: ApiCall, holder: Holder | None, caller: Caller | None
    ) -> ServedModel | None:
        if call.model:
            return await self._index.find(call.model)
        if call.names_response is None:
            return only_model(self._index.models())
        rights = response_holder.Rights(caller=caller, aliases=self._aliases, cost=call.cost)
        return response_holder.served_at(holder, rights.among(self._index.models(), holder))
