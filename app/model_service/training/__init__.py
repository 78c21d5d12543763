"""The reference trainer: GSPO in plain torch, over batches of recorded token ids. Needs the extra `train`."""
