"""Content of samples, one module per modality. See base.py for the interface that the other stages use."""
