"""From files of rows to token ids and targets."""
