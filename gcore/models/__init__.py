"""Networks of transformers: loaded or built small, their layers, masks and vision towers."""
