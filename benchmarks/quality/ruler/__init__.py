"""RULER (arXiv 2404.06654) over HTTP: what sparse decode costs a whole model. See __main__.py for the commands."""
