"""Runs fleets: the local one (`deploy.local`), in containers (`compose.yaml`), and the demo."""
