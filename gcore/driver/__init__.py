"""Around a run: starts the processes, supervises them, restarts what dies; the folder of the run."""
