"""Observation of a run: metrics, a timeline, the live view, the final report. Imports fast and without torch."""
