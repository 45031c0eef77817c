"""Operations of one device: they know no process groups."""
