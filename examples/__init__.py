"""Programs a user would copy: `client.py`, and the demo that `make demo` runs."""
