"""Settings that must be in place before NumPy, torch or TensorFlow is imported."""

import os

# Several processes share few cores: one thread each, in this process and in the ranks that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # Horovod's Keras optimizer needs tf_keras

from hypothesis import settings

settings.register_profile("busy", deadline=None)  # a time is never asserted
settings.load_profile("busy")
