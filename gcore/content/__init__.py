"""The content of samples (tokens, images, ...), one module per modality. base.py is the interface for other stages."""
