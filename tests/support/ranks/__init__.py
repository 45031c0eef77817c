"""What pools of ranks run, and the grids of layouts that they are asked for."""
