"""`python -m deploy.chaos`: every fault, under load, and what it cost."""
