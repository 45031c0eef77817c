"""The process: device, versions, environment, configuration keys, helper processes, stand-ins for CUDA."""
