"""One file per stage: the only place where the frames meet."""
