"""Turn samples into rows of ranks: balance, plan, packing. All but `distribute` is pure."""
