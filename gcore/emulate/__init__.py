"""Roles that take the time of a device and compute nothing, so that real runs work on any machine."""
