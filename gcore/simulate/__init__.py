"""Simulated clusters.

scenario         a cluster and its load, from YAML
cluster, fleet   one rollout, event by event, with the placement rules and the routing of runs
run, table       whole runs under several rules: `gcore simulate`
"""
