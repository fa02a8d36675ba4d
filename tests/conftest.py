"""For all tests: no hub but on loopback. Tests of the hub start one there; elsewhere an id finds nothing. And threads
of torch that wait do not spin, as in the processes of G-Core: two test processes share the cores."""

import os

os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nothing listens there
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported
