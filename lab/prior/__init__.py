"""Building what `codec/data/mix.gguf` holds: tables of the corpus and trained weights."""
