"""The families, one file each: a picture of the order, and a small pure function that makes it.

In the pictures, a row is a rank, time runs to the right, a digit is the microbatch of an F, a letter that of a
backward (a for 0, b for 1, …), and a dot is idle time.
"""
