"""Take an optimizer step: forward_backward and optim_step."""
