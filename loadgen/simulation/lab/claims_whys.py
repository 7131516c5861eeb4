"""Why a published claim fares as it does in the lab, by its identity in `report.claims.CLAIMS`."""

from typing import Final

WHYS: Final[dict[str, str]] = {}
