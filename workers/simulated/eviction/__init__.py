"""Eviction policies of the simulated engines: which free block goes next.

One module per policy, all with the interface of `base.EvictionOrder`; `policies` names them.
"""
