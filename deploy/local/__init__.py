"""`python -m deploy.local`: a fleet of processes on this machine, without anything installed."""
