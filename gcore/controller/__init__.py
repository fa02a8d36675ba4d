"""The driver and the controllers of a run. Start with loop.py.

driver      supervise          starts the processes, restarts dead replicas, shows progress
            build              configuration -> objects of every role
            sources, preflight, footprint      checks before the start; dry_run prints them
            gpu_memory         does it fit; activation checkpointing and off-load by `auto`
            auto, plan, gpu_assignment         placement mode, numbers of processes, GPUs of each process
controller  loop               the training loop
            setup, opening, services           from the clients of other roles to the objects of the loop
            collect            rollout phase: prompt_ledger, step_ledger (states of prompts), attempt, workflow
            dispatch           samples -> trainer ranks, weight updates -> engines
            placement, replicas                which engines serve a rollout; replicas that die
            warm_start, evaluation, checkpointing, failures, record, status
commands    export, train_rm   `gcore export`, `gcore train-rm`
"""
