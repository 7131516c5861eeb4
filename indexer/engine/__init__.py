"""What comes from the engine: its HTTP side, its event sockets, its events as plain values."""
