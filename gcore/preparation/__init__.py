"""From scored groups to training batches: advantages, samples, and the layout of batches over trainer ranks."""
