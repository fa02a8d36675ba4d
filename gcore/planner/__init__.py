"""`gcore plan`: does a run fit on some GPUs, how long is a step, which placement is fastest. No GPU is needed."""
