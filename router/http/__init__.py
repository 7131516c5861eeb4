"""The HTTP side of clients and operators: paths, exchanges, failures."""
