"""Measurements of speed and quality, and the models they and the demo run on."""
