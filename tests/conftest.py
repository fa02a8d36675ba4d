"""For all tests: no hub but on loopback. Tests of the hub start one there; elsewhere an id finds nothing."""

import os

os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nothing listens there
