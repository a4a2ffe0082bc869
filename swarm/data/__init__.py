"""Where tokens come from: documents, tokenizer, shards on disk, streams of batches."""
