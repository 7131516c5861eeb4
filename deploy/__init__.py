"""Runs fleets: the local one (`deploy.local`), the demo, the containers."""
