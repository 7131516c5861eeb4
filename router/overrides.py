"""What a request may choose by headers, where the operator lets it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from router import headers as names
from router.errors import RequestInvalid
from router.policies.base import Policy
from router.requests.api_call import ApiCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Policy and instances of a request.

    Attributes:
        policies: all that can be asked for, by name.
        default_policy: for requests that ask for none.
        allow_policy: whether a request may ask for one.
        allow_instances: whether a request may name the instances it may go to.
    """

    policies: Mapping[str, Policy]
    default_policy: str
    allow_policy: bool
    allow_instances: bool

    def policy(self, call: ApiCall) -> Policy:
        """The policy that decides.

        Raises:
            RequestInvalid: the request asks for one, and may not, or for one that there is not.
        """
        name = call.policy
        if name is None:
            return self.policies[self.default_policy]
        if not self.allow_policy:
            raise RequestInvalid(
                f"{names.POLICY}: this router takes no policy from requests; leave the header "
                "out, or start the router with --allow_policy_override true.",
                param=names.POLICY,
            )
        if name not in self.policies:
            known = ", ".join(sorted(self.policies))
            raise RequestInvalid(
                f"{names.POLICY}: unknown policy `{name}`; known policies: {known}.",
                param=names.POLICY,
            )
        return self.policies[name]

    def check_instances(self, call: ApiCall) -> None:
        """Look whether the request may name instances, if it does.

        Raises:
            RequestInvalid: it may not.
        """
        if call.asked_instances is not None and not self.allow_instances:
            raise RequestInvalid(
                f"{names.ASKED_INSTANCES}: this router lets no request choose its instance; leave "
                "the header out, or start the router with --allow_instance_choice true.",
                param=names.ASKED_INSTANCES,
            )
