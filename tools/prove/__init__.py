"""isoloss-prove: loss and gradients of layouts against one rank."""
