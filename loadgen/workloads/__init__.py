"""Workloads: one file per trace format and one per generator, all giving the same `TraceRow`s.

Readers: `timestable`, `mooncake`, `bailian`, `azure`, `weka`, `servegen`, `lmcache`, `tau_bench`,
`ragpulse`; `reading` tells them apart. Generators: `hot_prefix`, `cache_mix`, `agents`. `pacing`
turns rows into what is sent when. The formats are described in docs/traces.md.
"""
