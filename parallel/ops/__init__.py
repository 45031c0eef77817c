"""Operations of one device, without process groups."""
