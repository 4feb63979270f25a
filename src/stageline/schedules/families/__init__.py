"""The schedule families: pictures of their orders, and small pure functions that build them.

In the pictures, a row is a rank, time runs to the right, every action takes one unit, and a dot is idle time. With one
stage per rank, a digit is the microbatch of an F, a lowercase letter that of a B or I (a for 0), and an uppercase
letter that of a W. With more stages, the pictures are those of `stageline show`, with lowercase letters for the second
chunk.

Read `gpipe` and `one_f_one_b` (1f1b, zb-h1, zb-h2) first, then `interleaved` (several chunks; forward-only),
`v_placement` (zb-v, v-half, v-min, hanayo) and `two_way` (chimera, dualpipe). No family knows costs or imports torch.
"""
