"""Policies of a scenario by name: the router's, and the same with other parameters. Pure.

`smetric[slack=2,eviction_ratio=0.25]` is the policy `smetric` with these; the whole is its name in
the results.
"""

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

from router.policies import policy_by_name
from router.policies.base import Policy

_NAME: Final = re.compile(r"(?P<base>\w+)(\[(?P<changes>[^\[\]]+)\])?")


def policy_of(name: str) -> Policy:
    """The policy that a scenario names.

    Raises:
        ValueError: there is no such policy, or it has no such parameter; the message lists those
            that exist.
    """
    parts = _NAME.fullmatch(name.replace(" ", ""))
    if parts is None:
        raise ValueError(f"`{name}` is no policy: write name or name[parameter=number,...]")
    policy: Any = policy_by_name(parts["base"])
    if parts["changes"] is None:
        return policy  # type: ignore[no-any-return]  # a Policy, as it was
    known = (
        [one.name for one in fields(policy) if one.name != "name"] if is_dataclass(policy) else []
    )
    changes: dict[str, float] = {}
    for change in parts["changes"].split(","):
        parameter, _, value = change.partition("=")
        if parameter not in known:
            raise ValueError(
                f"policy `{parts['base']}` has no parameter `{parameter}`; it has "
                f"{', '.join(known) or 'none'}"
            )
        try:
            changes[parameter] = float(value)
        except ValueError as error:
            raise ValueError(f"{name}: `{value}` is no number") from error
    return replace(policy, name=name, **changes)  # type: ignore[no-any-return]  # likewise
