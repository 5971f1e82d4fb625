"""Training data: the tokens of each sample, and which rank computes which samples."""

from drystone.run.train.data.source import DataRequest, TokenSource, open_source, open_tokens
from drystone.run.train.data.token_file import SyntheticTokens, TokenFile
from drystone.run.train.data.works import RankWork, micro_batches, rank_works

__all__ = [
    "DataRequest",
    "RankWork",
    "SyntheticTokens",
    "TokenFile",
    "TokenSource",
    "micro_batches",
    "open_source",
    "open_tokens",
    "rank_works",
]
