"""The families of models, a file each: from config.json to an `Architecture`."""
