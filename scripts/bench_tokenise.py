"""Measures how fast text becomes shards, against the package tokenizers' own `encode_batch_fast`.

Both use all cores, on the same documents in memory, by turns in one process: A B B A ... The first
reads a folder of text and writes shards with all that belongs to it (digests, split, duplicates);
the second only calls `encode_batch_fast` on all documents, a hundred at a time, and drops what
it returns. Prints the rate of each turn and the median of the ratios of neighbouring turns.

Usage: scripts/bench_tokenise.py --megabytes 50 --turns 3 [--tokenizer DIR]
"""
