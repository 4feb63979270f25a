"""The schedule families, one file each: a picture of the order, and a small pure function that builds it.

In the pictures, a row is a rank, time runs to the right, every action takes one unit, and a dot is idle time. With one
stage per rank, a digit is the microbatch of an F, a lowercase letter that of a B or I (a for 0), and an uppercase
letter that of a W. With more stages, the pictures are those of `stageline show`, with lowercase letters for the second
chunk.

Read `gpipe` and `one_f_one_b` first, then any other. No family knows costs or imports torch.
"""
