"""The one core: cost, efficiency, selection, codecs, memory, policy and the pipeline.

Nothing here imports torch, TensorFlow or Horovod.  Arrays of any of the three kinds reach
their primitive operations through :mod:`hvd_adaptive.core.backend`.
"""
