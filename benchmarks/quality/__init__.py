"""What sparse decode costs in accuracy."""
