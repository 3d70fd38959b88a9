"""The demo: a real model behind a real server, asked over HTTP with several decode methods."""
