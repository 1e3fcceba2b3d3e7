"""Training by simulated workers: real gradients, real messages, modelled time.  Needs PyTorch."""
