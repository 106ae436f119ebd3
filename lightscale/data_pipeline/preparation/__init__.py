"""From the files of a corpus to a token store."""
