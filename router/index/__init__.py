"""What Redis says of fleets, and what is done while it does not answer."""
