"""Programs that probe.py runs in processes of their own; each prints one JSON object as its last line."""
