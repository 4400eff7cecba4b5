"""Compute and communication in one kernel each, over symmetric memory.

A *stage* is a class with ``create(ctx, group, **problem)``, collective, which allocates everything;
``stage(..., out=...)``, which only launches on the current stream: no allocation, no zeroing, no
meeting on the host; and ``warm(...)``, with the same arguments, which compiles and loads the kernel
and computes nothing. Ranks may share out the compiling first (`host.Turns`). All ranks must have
warmed a stage before any launches it: loading a module can block behind a kernel that waits for a
peer. Every rank of the group launches a stage equally often.

============================  ==================================================================
`all_gather_matmul`           ``epilogue[i](all_gather(x, 0 or 1) @ w[i])``; or a pair of weights
`matmul_reduce_scatter`       ``after(reduce_scatter(epilogue(x @ w), 0))``
`matmul_all_reduce`           ``after(all_reduce(epilogue(x @ w)))`` in one or two steps; its norm
`matmul_all_gather`           ``after(all_gather(epilogue(x @ w), 0))``
`all_reduce_norm`             ``rms_norm(after(all_reduce(x)))``, and the sum
`collectives`                 all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, ...
============================  ==================================================================

Shapes may be any, shards follow torch.chunk (the last ones smaller or empty), operands have any
strides. To scatter or send columns is the transposed problem: ``stage(w.T, x.T, out=out.T)``.

Epilogues
---------
An epilogue is a ``@device_function`` (`iris.device.target`) that is compiled into the kernel::

    @device_function
    def bias_gelu(tiles, rows, columns, M, N, args):
        bias = tl.load(args[0] + columns, mask=columns < N, other=0)
        x = tiles[0] + bias[None, :]
        return x * tl.sigmoid(1.702 * x)

``tiles`` holds the accumulators of the two weights of a pair (of a single weight, the same one
twice): fp32, or int32 for int8 operands. ``rows`` [R] and ``columns`` [C] are the places of the
tile's elements in the [M, N] result; some may lie outside it. ``args`` is the tuple that the stage
is called with: tensors, as pointers, and numbers. What is returned, [R, C], is rounded to the
result's type. The function is called for pieces of tiles, in any order, some shapes smaller than a
tile; it must not depend on which.

The protocol between ranks is in `protocol` (NOTE [Epochs], NOTE [Progress]), the GEMM loop in
`gemm` (NOTE [One loop]), who computes what in `schedule`.
"""
