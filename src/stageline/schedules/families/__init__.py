"""The families, one file each: a picture of the order, and a small pure function that makes it.

In the pictures a row is a rank, time runs to the right, every action takes one unit, and a dot is idle time. Families
with one stage a rank: a digit is the microbatch of an F, a small letter that of a B or I (a for 0), a capital that
of a W. Families with more: as `stageline show` prints them, small letters being a rank's second chunk.
"""
