"""Draws without randomness: a number per instance from a key and its id."""

from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from router.snapshot import FleetSnapshot

DRAW_SEED: Final = 0x7157AB1E
"""Other draws than those of the tie-break, so that neither favours whom the other did."""


def draws(key: str, fleet: FleetSnapshot) -> npt.NDArray[np.float64]:
    """Uniform in (0, 1], shape (instances,); independent over keys and over instances.

    Depends on neither the order nor the number of instances: routers agree on a key, and of an
    instance that leaves only its own draw goes.
    """
    digest = np.uint64(xxhash.xxh3_64_intdigest(key.encode(), seed=DRAW_SEED))
    mixed = fleet.identity ^ digest  # then the finalizer of splitmix64
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    fractions: npt.NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64)
    return (fractions + 1.0) * 2.0**-53


def order(values: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Place of each value in ascending order, from 0."""
    places = np.empty(len(values), np.int64)
    places[values.argsort(kind="stable")] = np.arange(len(values))
    return places
