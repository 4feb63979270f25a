"""Torch helpers that know no pipeline: trees, random numbers per layer, buffers, thread context, host memory.

Nothing here knows what a stage, a rank or a schedule is. Read the file you need.
"""
