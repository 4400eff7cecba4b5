"""The dataflow graph: types, nodes, ops, passes, text. Imports neither torch nor triton."""
