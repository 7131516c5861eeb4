"""`python -m deploy.demo`: one workload, several policies, one local fleet, side by side."""
