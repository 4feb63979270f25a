"""Parts of a batch that need more than cutting along the first dimension.

Read in order: `chunk_specs` (along which dimension to cut, how to merge outputs), `opaque_objects` (objects that cannot
be cut, refused by name), `input_gradients`, `comparison` (whether all ranks were given the same batch). Nothing here
runs a stage.
"""
