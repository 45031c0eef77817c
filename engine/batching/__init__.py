"""From samples to rows of ranks: balance, plan, packing. Pure, but for `distribute`."""
