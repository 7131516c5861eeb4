"""The policy lab: policies, workloads, loads and fleets in virtual time."""
