"""The data of a job: sources of samples, their order, and the share of each replica.

Read in order: `opening`, `source`, `documents`, `tokenizer`, `byte_pairs`, `stream`, `loader`. Nothing here
knows a model or a pipeline.
"""

from stageline.train.data.byte_pairs import BytePairs
from stageline.train.data.loader import Loader, Prefetch
from stageline.train.data.opening import Data, data_of, open_data, tokenizer_name
from stageline.train.data.source import Batch, Indexed, Items, Source, Tokens, check_same, split
from stageline.train.data.stream import Stream
from stageline.train.data.tokenizer import Bytes, File, Tokenizer, find_tokenizer

__all__ = [
    "Batch",
    "BytePairs",
    "Bytes",
    "Data",
    "File",
    "Indexed",
    "Items",
    "Loader",
    "Prefetch",
    "Source",
    "Stream",
    "Tokenizer",
    "Tokens",
    "check_same",
    "data_of",
    "find_tokenizer",
    "open_data",
    "split",
    "tokenizer_name",
]
