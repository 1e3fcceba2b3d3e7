"""Communication-adaptive gradient compression behind unmodified Horovod.

Importing this package needs neither Horovod nor a framework.  The plug-ins are
``hvd_adaptive.torch`` and ``hvd_adaptive.tensorflow``; the logic that both share is
``hvd_adaptive.core``.
"""

__version__ = "0.1.0"
