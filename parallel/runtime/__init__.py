"""The process: device, versions, environment, helper processes, stand-ins for CUDA."""
