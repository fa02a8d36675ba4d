"""Transfer of the policy's weights from the trainer to the engines.

    trainer rank                       controller 0             engine
    WeightPublisher ──bucket (Ref)──>  WeightTransfer  ──Ref──> WeightReceiver ──tensors──> the engine's parameters
    gathers, converts, packs           orders, retries          unpacks, checks, merges adapters

The bytes of a bucket are sent by one of four methods (publisher.py). Only references pass through the controller, no
weights. Every bucket has a checksum, and every engine returns the version that it serves.

    publisher.py   trainer side, and which of the four methods a run uses
    bucket.py      tensors <-> one block of memory with a checksum
    broadcast.py   the method `broadcast`: a process group of rank 0 and the engines
    transfer.py    controller side
    receiver.py    engine side

The packages `training` and `generation` import this package. It imports neither of them.
"""
