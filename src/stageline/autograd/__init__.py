"""The backward pass in two halves, and recomputation.

`split_backward` runs the gradient of the inputs (I) and the gradient of the weights (W) of a recorded graph separately.
This package knows autograd graphs and modules. It knows no ranks, microbatch schedules or transports.

Read in order: `split_backward`, `graph_plan`, `graph_analysis`, `weight_gradients`, `engine`, `recompute`, and
`graphs/` for compiled units.
"""
