"""Where sessions and leases live."""
