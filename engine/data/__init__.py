"""Turn files of rows into token ids and targets."""
