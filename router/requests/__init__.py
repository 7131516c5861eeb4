"""What clients ask for: request bodies, checked and taken apart."""
