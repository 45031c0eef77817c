"""Read the rows of files, folders, globs and data sets of the Hugging Face hub."""
