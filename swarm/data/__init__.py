"""Sources of tokens: documents, tokenizer, shards on disk, streams of batches."""
