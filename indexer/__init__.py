"""The sidecar beside one vLLM engine, and the contract it publishes (`indexer.contract`)."""
