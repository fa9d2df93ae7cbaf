"""Tensor parallelism: rank 0 leads, the others follow; see `lazyrag.model.ranks`.

    message      what every rank does                                        over heads
    open         (the others) a pool and an encoder as rank 0 has them
    launch       one packed pass over its heads; rank 0 says who the new sequences are
    look         a pass up to a layer, measuring attention                    all to every rank
    encode       nodes behind the sink                                        gathered on rank 0
    write        raw K and V into pages                                       scattered by rank 0
    close        leave

Scheduling, recognition, the store and sampling are rank 0's alone, so that nothing in them knows of
ranks. Nodes are scattered rather than read by every rank: only one process checks them, no disk
need be shared, and host memory holds a node once.
"""
